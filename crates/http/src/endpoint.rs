use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A name or address of a host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    /// Address.
    Ip(IpAddr),
    /// DNS name, in lower case.
    Name(String),
}

/// `host:port`, `address:port`, `[v6]:port`; the port is not 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    /// Host.
    pub host: Host,
    /// Port, 1 to 65535.
    pub port: u16,
}

/// Base URL of a peer: `http://host:port`, nothing behind it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint(HostPort);

/// An address that cannot be used. The message repeats the element.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address {element:?} {problem}")]
pub struct AddressError {
    /// The element as it was given.
    pub element: String,
    /// What is wrong with it and what is allowed.
    pub problem: String,
}

impl Host {
    /// A name or an address, IPv6 with or without brackets.
    ///
    /// # Errors
    /// [`AddressError`] repeats the text.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let fail = |problem: &str| {
            Err(AddressError {
                element: text.to_owned(),
                problem: problem.to_owned(),
            })
        };
        if text.is_empty() {
            return fail("has no host");
        }
        if let Some(inner) = text.strip_prefix('[') {
            return match inner
                .strip_suffix(']')
                .and_then(|v6| v6.parse::<Ipv6Addr>().ok())
            {
                Some(v6) => Ok(Self::Ip(v6.into())),
                None => fail("is not an IPv6 address in brackets"),
            };
        }
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self::Ip(ip));
        }
        if text.contains(':') {
            return fail(
                "is neither a name nor an address; IPv6 addresses with a port need brackets",
            );
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        // A name whose last label is a number would be taken for an address by some resolvers.
        let last = name.rsplit('.').next().unwrap_or_default();
        if !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit()) {
            return fail("is not an IPv4 address (four numbers from 0 to 255)");
        }
        let label = |l: &str| {
            (1..=63).contains(&l.len())
                && l.bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
                && !l.starts_with('-')
                && !l.ends_with('-')
        };
        if name.len() > 253 || !name.split('.').all(label) {
            return fail(
                "is not a host name (labels of letters, digits and hyphens, 63 characters at most)",
            );
        }
        Ok(Self::Name(name.to_ascii_lowercase()))
    }

    /// Is this an address of this host's loopback interface (or the name `localhost`)?
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Ip(ip) => ip.is_loopback(),
            Self::Name(name) => name == "localhost",
        }
    }

    /// Is this the wildcard `0.0.0.0` or `::`?
    pub fn is_wildcard(&self) -> bool {
        matches!(
            self,
            Self::Ip(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
                | Self::Ip(IpAddr::V6(Ipv6Addr::UNSPECIFIED))
        )
    }
}

impl HostPort {
    /// From host and port given apart, as the public proxies' flags do.
    ///
    /// # Errors
    /// [`AddressError`] names host and port.
    pub fn from_parts(host: &str, port: &str) -> Result<Self, AddressError> {
        let element = format!("{host}:{port}");
        let fail = |problem: String| AddressError {
            element: element.clone(),
            problem,
        };
        let host = Host::parse(host.trim()).map_err(|e| fail(e.problem))?;
        let port = parse_port(port.trim()).map_err(fail)?;
        Ok(Self { host, port })
    }

    /// `host:port` for messages, IPv6 in brackets, without any check.
    pub fn display(host: &str, port: u16) -> String {
        match host.parse::<Ipv6Addr>() {
            Ok(v6) => format!("[{v6}]:{port}"),
            Err(_) => format!("{host}:{port}"),
        }
    }
}

impl Endpoint {
    /// Host and port.
    pub fn host_port(&self) -> &HostPort {
        &self.0
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |problem: String| AddressError {
            element: text.to_owned(),
            problem,
        };
        if text.trim().is_empty() {
            return Err(fail("is empty".to_owned()));
        }
        let (host, port) = match text.rsplit_once(':') {
            // `::1` has colons but no port.
            Some((host, _)) if host.contains(':') && !host.starts_with('[') => {
                return Err(fail(
                    "needs brackets around the IPv6 address: [address]:port".to_owned(),
                ));
            }
            Some((host, _)) if host.starts_with('[') && !host.ends_with(']') => {
                return Err(fail("has no port; the form is [address]:port".to_owned()));
            }
            Some(parts) => parts,
            None => return Err(fail("has no port; the form is host:port".to_owned())),
        };
        let host = Host::parse(host).map_err(|e| fail(e.problem))?;
        let port = parse_port(port).map_err(fail)?;
        Ok(Self { host, port })
    }
}

impl FromStr for Endpoint {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |problem: &str| AddressError {
            element: text.to_owned(),
            problem: problem.to_owned(),
        };
        if text.trim().is_empty() {
            return Err(fail("is empty"));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(fail("has no scheme; the form is http://host:port"));
        };
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(fail(
                "has a scheme other than http; the form is http://host:port",
            ));
        }
        if rest.contains('@') {
            return Err(fail(
                "contains user information; keys come from the environment or a file",
            ));
        }
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains(['/', '?', '#']) {
            return Err(fail(
                "has a path, query or fragment; the form is http://host:port",
            ));
        }
        HostPort::from_str(rest)
            .map(Self)
            .map_err(|e| fail(&e.problem))
    }
}

impl From<HostPort> for Endpoint {
    fn from(host_port: HostPort) -> Self {
        Self(host_port)
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(IpAddr::V6(v6)) => write!(f, "[{v6}]"),
            Self::Ip(ip) => write!(f, "{ip}"),
            Self::Name(name) => f.write_str(name),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

fn parse_port(text: &str) -> Result<u16, String> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port != 0 => Ok(port),
        _ => Err(format!("has port {text:?}; allowed are 1 to 65535")),
    }
}
