use crate::Client;
use std::collections::BTreeMap;

/// A scrape of `/metrics`: value by series (name with labels as printed).
#[derive(Clone, Debug, PartialEq)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Scrapes an instance or router.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn of(client: &Client) -> Result<Self, String> {
        let answer = client.get("/metrics").await?;
        if answer.status != 200 {
            return Err(format!("/metrics answers {}", answer.status));
        }
        let mut series = BTreeMap::new();
        for line in answer.text().lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, value)) = line.rsplit_once(' ')
                && let Ok(value) = value.parse()
            {
                series.insert(name.to_owned(), value);
            }
        }
        Ok(Self(series))
    }

    /// Sum of all series of `name` whose labels contain every one of `labels` (`key="value"`).
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        self.0
            .iter()
            .filter(|(series, _)| {
                let (base, rest) = series.split_once('{').unwrap_or((series, ""));
                base == name && labels.iter().all(|label| rest.contains(label))
            })
            .map(|(_, value)| value)
            .sum()
    }

    /// Number of series.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Nothing was scraped.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
