//! Which instances there are: flags, the public proxies' lists and the file give the same list.

use crate::RouterError;
use std::collections::HashMap;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;
use twinfer_config::ranges::MAX_BODY_BYTES;
use twinfer_config::{MOST_SECONDS, RouterConfig};
use twinfer_http::{Endpoint, HostPort};
use twinfer_protocol::Role;

/// Most bytes of the instances file.
const MAX_FILE: u64 = 4 << 20;

/// An instance as it was configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSpec {
    /// What it is used for.
    pub role: Role,
    /// Where it listens.
    pub endpoint: Endpoint,
}

/// The times of a configuration, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) health_interval: Duration,
    pub(crate) connect: Duration,
    pub(crate) prefill: Duration,
    pub(crate) first_byte: Duration,
    pub(crate) idle: Duration,
    pub(crate) drain_settle: Duration,
    pub(crate) drain_timeout: Duration,
}

/// Collects instances and what is wrong with them.
#[derive(Default)]
struct Collector {
    specs: Vec<InstanceSpec>,
    seen: HashMap<HostPort, String>,
    problems: Vec<String>,
}

impl InstanceSpec {
    /// Every instance of a configuration, in the order flags, lists, file.
    ///
    /// # Errors
    /// [`RouterError::Config`] names every bad element: no scheme, bad host or port, empty, given
    /// twice, lists of different length, none at all, prefill without decode or the reverse.
    pub fn read(config: &RouterConfig) -> Result<Vec<Self>, RouterError> {
        let mut all = Collector::default();
        let flags = [
            ("--prefill", Role::Prefill, &config.prefill),
            ("--decode", Role::Decode, &config.decode),
            ("--worker", Role::Both, &config.worker),
        ];
        for (flag, role, urls) in flags {
            for (index, url) in urls.iter().enumerate() {
                all.url(&format!("{flag}, element {}", index + 1), role, url);
            }
        }
        all.lists(
            "prefiller",
            Role::Prefill,
            &config.prefiller_hosts,
            &config.prefiller_ports,
        );
        all.lists(
            "decoder",
            Role::Decode,
            &config.decoder_hosts,
            &config.decoder_ports,
        );
        if let Some(path) = &config.instances_file {
            all.file(path);
        }
        // Others may come later.
        let closed = config.admin_port.is_none() && config.instances_file.is_none();
        all.finish(closed)
    }

    /// The instances of a file.
    ///
    /// # Errors
    /// [`RouterError::Config`] names every bad line, or says why it cannot be read.
    pub(crate) fn read_file(path: &Path) -> Result<Vec<Self>, RouterError> {
        let mut all = Collector::default();
        all.file(path);
        all.finish(false)
    }
}

impl Times {
    pub(crate) fn read(config: &RouterConfig) -> Result<Self, RouterError> {
        let mut problems = Vec::new();
        let mut seconds = |flag: &str, value: f64, least: f64| {
            if (least..=MOST_SECONDS).contains(&value) {
                Duration::try_from_secs_f64(value).unwrap_or_default()
            } else {
                problems.push(format!(
                    "{flag} is {value}; allowed are {least} to {MOST_SECONDS} seconds"
                ));
                Duration::ZERO
            }
        };
        let times = Self {
            health_interval: seconds("--health-interval", config.health_interval, 0.05),
            connect: seconds("--connect-timeout", config.connect_timeout, 0.01),
            prefill: seconds("--prefill-timeout", config.prefill_timeout, 0.01),
            first_byte: seconds("--first-byte-timeout", config.first_byte_timeout, 0.01),
            idle: seconds("--idle-timeout", config.idle_timeout, 0.01),
            drain_settle: seconds("--drain-settle", config.drain_settle, 0.0),
            drain_timeout: seconds("--drain-timeout", config.drain_timeout, 0.0),
        };
        if config.max_attempts == 0 {
            problems.push("--max-attempts is 0; allowed are 1 and more".to_owned());
        }
        if !(0.0..=MOST_SECONDS).contains(&config.queue_timeout) {
            problems.push(format!(
                "--queue-timeout is {}; allowed are 0 to {MOST_SECONDS} seconds",
                config.queue_timeout
            ));
        }
        if config.max_inflight == 0 {
            problems.push("--max-inflight is 0; allowed are 1 and more".to_owned());
        }
        if !MAX_BODY_BYTES.contains(&config.max_body_bytes) {
            problems.push(format!(
                "--max-body-bytes is {}; allowed are {} to {}",
                config.max_body_bytes,
                MAX_BODY_BYTES.start(),
                MAX_BODY_BYTES.end()
            ));
        }
        if problems.is_empty() {
            Ok(times)
        } else {
            Err(RouterError::Config(problems))
        }
    }
}

impl Collector {
    fn url(&mut self, place: &str, role: Role, url: &str) {
        match url.trim().parse::<Endpoint>() {
            Ok(endpoint) => self.add(place, role, endpoint),
            Err(error) => self.problems.push(format!("{place}: {error}")),
        }
    }

    fn add(&mut self, place: &str, role: Role, endpoint: Endpoint) {
        let host_port = endpoint.host_port().clone();
        if let Some(earlier) = self.seen.get(&host_port) {
            self.problems
                .push(format!("{place}: {host_port} was given before ({earlier})"));
            return;
        }
        self.seen.insert(host_port, place.to_owned());
        self.specs.push(InstanceSpec { role, endpoint });
    }

    fn lists(&mut self, name: &str, role: Role, hosts: &[String], ports: &[String]) {
        if hosts.len() != ports.len() {
            self.problems.push(format!(
                "--{name}-hosts has {} elements and --{name}-ports has {}; they must have as many",
                hosts.len(),
                ports.len()
            ));
            return;
        }
        for (index, (host, port)) in hosts.iter().zip(ports).enumerate() {
            let place = format!("--{name}-hosts and --{name}-ports, element {}", index + 1);
            match HostPort::from_parts(host, port) {
                Ok(host_port) => self.add(&place, role, host_port.into()),
                Err(error) => self.problems.push(format!("{place}: {error}")),
            }
        }
    }

    fn file(&mut self, path: &Path) {
        let text = match read_bounded(path) {
            Ok(text) => text,
            Err(error) => {
                self.problems
                    .push(format!("--instances-file {}: {error}", path.display()));
                return;
            }
        };
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let place = format!("{}:{}", path.display(), index + 1);
            let (role, url) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            match role.parse() {
                Ok(role) => self.url(&place, role, url),
                Err(problem) => self.problems.push(format!("{place}: {problem}")),
            }
        }
    }

    /// `closed`: no instance can come later.
    fn finish(mut self, closed: bool) -> Result<Vec<InstanceSpec>, RouterError> {
        if self.problems.is_empty() && closed {
            let has = |role| self.specs.iter().any(|spec| spec.role == role);
            match (has(Role::Prefill), has(Role::Decode), has(Role::Both)) {
                (false, false, false) => self.problems.push(
                    "no instance is given; use --prefill and --decode, --worker, --instances-file or --admin-port".to_owned(),
                ),
                (true, false, _) => {
                    self.problems.push("--prefill is given without --decode; a pair needs both".to_owned());
                }
                (false, true, _) => {
                    self.problems.push("--decode is given without --prefill; a pair needs both".to_owned());
                }
                _ => {}
            }
        }
        if self.problems.is_empty() {
            Ok(self.specs)
        } else {
            Err(RouterError::Config(self.problems))
        }
    }
}

/// A text file of a sane size.
fn read_bounded(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(path)?;
    if file.take(MAX_FILE + 1).read_to_string(&mut text)? as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!(
            "it has more than {MAX_FILE} bytes"
        )));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|&s| s.to_owned()).collect()
    }

    fn problems(config: &RouterConfig) -> String {
        InstanceSpec::read(config).expect_err("bad").to_string()
    }

    fn pair(prefill: &[&str], decode: &[&str]) -> RouterConfig {
        RouterConfig {
            prefill: strings(prefill),
            decode: strings(decode),
            ..RouterConfig::default()
        }
    }

    #[test]
    fn c1_3_every_bad_element_is_named() {
        let good = "http://10.0.0.1:7100";
        for (bad, said) in [
            ("http://192.0.2.3192.0.2.4:7100", "192.0.2.3192.0.2.4"),
            ("", "is empty"),
            ("10.0.0.2:7100", "no scheme"),
            ("http://10.0.0.2:0", "\"0\""),
            ("http://10.0.0.2:70000", "70000"),
            ("http://10.0.0.1:7100", "given before"),
            ("http://user:key@10.0.0.2:7100", "user information"),
        ] {
            let text = problems(&pair(&[good], &["http://10.0.0.9:1", bad]));
            assert!(
                text.contains("--decode, element 2") && text.contains(said),
                "{bad}: {text}"
            );
        }
        let both = problems(&pair(&["x", good], &["y"]));
        assert!(
            both.contains("--prefill, element 1") && both.contains("--decode, element 1"),
            "{both}"
        );
    }

    #[test]
    fn c1_3_lists_need_as_many_ports_as_hosts() {
        let config = RouterConfig {
            prefiller_hosts: strings(&["a", "b", "c", "d"]),
            prefiller_ports: strings(&["1", "2", "3"]),
            ..pair(&[], &["http://10.0.0.9:1"])
        };
        let text = problems(&config);
        assert!(
            text.contains("--prefiller-hosts has 4") && text.contains("--prefiller-ports has 3"),
            "{text}"
        );
        let config = RouterConfig {
            prefiller_hosts: strings(&["192.0.0.3\\192.0.0.4"]),
            prefiller_ports: strings(&["1"]),
            ..pair(&[], &["http://10.0.0.9:1"])
        };
        assert!(problems(&config).contains("element 1"));
    }

    #[test]
    fn c1_3_flags_lists_and_file_give_the_same_registry() {
        let flags = pair(
            &["http://[2001:db8::1]:7100", "http://node-1.example:7101"],
            &["http://10.0.0.2:7200"],
        );
        let lists = RouterConfig {
            prefiller_hosts: strings(&["2001:db8::1", "node-1.example"]),
            prefiller_ports: strings(&["7100", "7101"]),
            decoder_hosts: strings(&["10.0.0.2"]),
            decoder_ports: strings(&["7200"]),
            ..RouterConfig::default()
        };
        let mut file = tempfile::NamedTempFile::new().expect("file");
        writeln!(
            file,
            "# two of three\nprefill http://[2001:db8::1]:7100\n\nprefill  http://node-1.example:7101 # slow\ndecode http://10.0.0.2:7200"
        )
        .expect("write");
        let from_file = RouterConfig {
            instances_file: Some(file.path().to_owned()),
            ..RouterConfig::default()
        };
        let expected = InstanceSpec::read(&flags).expect("flags");
        assert_eq!(expected.len(), 3);
        assert_eq!(InstanceSpec::read(&lists).expect("lists"), expected);
        assert_eq!(InstanceSpec::read(&from_file).expect("file"), expected);
    }

    #[test]
    fn a_bad_line_of_the_file_is_named() {
        let mut file = tempfile::NamedTempFile::new().expect("file");
        writeln!(file, "prefill http://a:1\nprefil http://b:2\ndecode").expect("write");
        let config = RouterConfig {
            instances_file: Some(file.path().to_owned()),
            ..RouterConfig::default()
        };
        let text = problems(&config);
        assert!(
            text.contains(":2: role is \"prefil\"") && text.contains(":3: address"),
            "{text}"
        );
    }

    #[test]
    fn half_a_pair_is_refused() {
        assert!(problems(&pair(&["http://a:1"], &[])).contains("without --decode"));
        assert!(problems(&pair(&[], &["http://a:1"])).contains("without --prefill"));
        assert!(problems(&RouterConfig::default()).contains("no instance"));
    }

    #[test]
    fn times_and_sizes_out_of_range_are_named() {
        let config = RouterConfig {
            idle_timeout: f64::NAN,
            max_attempts: 0,
            max_body_bytes: 1 << 40,
            drain_timeout: -1.0,
            ..RouterConfig::default()
        };
        let text = Times::read(&config).expect_err("bad").to_string();
        for flag in [
            "--idle-timeout",
            "--max-attempts",
            "--max-body-bytes is 1099511627776",
            "--drain-timeout",
        ] {
            assert!(text.contains(flag), "no {flag} in {text}");
        }
    }
}
