//! Reading Prometheus text: sums of the samples of a name.

/// Sum of the samples of metric `name` that carry every `label="value"` of `labels`; none if there is no such sample.
pub(super) fn sum(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let mut total = None;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some(rest) = line.strip_prefix(name) else {
            continue;
        };
        let (labelled, value) = match rest.strip_prefix('{') {
            Some(rest) => match rest.rsplit_once('}') {
                Some((inside, value)) => (inside, value),
                None => continue,
            },
            None if rest.starts_with(' ') => ("", rest),
            // A longer name that begins with this one.
            None => continue,
        };
        let has = |(key, value): &(&str, &str)| {
            labelled
                .split(',')
                .any(|pair| pair == format!("{key}=\"{value}\""))
        };
        let Some(Ok(value)) = value.split_whitespace().next().map(str::parse::<f64>) else {
            continue;
        };
        if labels.iter().all(has) {
            *total.get_or_insert(0.0) += value;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a help\n# TYPE a counter\na_total{x=\"1\",y=\"2\"} 3\na_total{x=\"2\"} 4 1700000000\nb 5\na_totals 9\n";

    #[test]
    fn samples_are_summed_by_name_and_labels() {
        assert_eq!(sum(TEXT, "a_total", &[]), Some(7.0));
        assert_eq!(sum(TEXT, "a_total", &[("x", "1")]), Some(3.0));
        assert_eq!(sum(TEXT, "a_total", &[("x", "1"), ("y", "3")]), None);
        assert_eq!(sum(TEXT, "b", &[]), Some(5.0));
        assert_eq!(sum(TEXT, "c", &[]), None);
    }
}
