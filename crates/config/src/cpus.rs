/// Cores of a list such as `0-3,8`, ascending, each once.
///
/// # Errors
/// A sentence that names the element and what is allowed.
pub fn parse_cpus(text: &str) -> Result<Vec<usize>, String> {
    /// No machine has more; bounds what a range may ask for.
    const MOST: usize = 1 << 14;
    let bad = |element: &str| {
        format!(
            "cpus has {element:?}; allowed are core numbers below {MOST} and ranges, such as 0-3,8"
        )
    };
    let number = |digits: &str| {
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse::<usize>().ok().filter(|&n| plain && n < MOST)
    };
    let mut cpus = Vec::new();
    for element in text.split(',') {
        let element = element.trim();
        let (first, last) = element.split_once('-').unwrap_or((element, element));
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
            _ => return Err(bad(element)),
        }
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        assert_eq!(parse_cpus("0-3,8").unwrap(), [0, 1, 2, 3, 8]);
        assert_eq!(parse_cpus(" 5 , 1-2,2").unwrap(), [1, 2, 5]);
    }

    #[test]
    fn what_is_no_core_is_named() {
        for bad in [
            "",
            "a",
            "1-",
            "-1",
            "3-1",
            "0,,1",
            "+1",
            "99999999999",
            "0-99999",
        ] {
            assert!(parse_cpus(bad).is_err(), "{bad:?}");
        }
        assert!(parse_cpus("0,x").unwrap_err().contains("\"x\""));
    }
}
