//! Which KV channels an importer may dial. Pure: names are compared as they were written, and resolved
//! only after they were allowed.

use std::fmt;
use std::net::IpAddr;
use twinfer_http::{AddressError, Host, HostPort};
use twinfer_protocol::openai::shown;
use twinfer_protocol::{ApiError, ErrorKind};

/// Host and port of a KV channel: one spelling per host, and no wildcard.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(HostPort);

/// What `--pd-peers` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerList {
    /// None: any port of loopback.
    listed: Option<Vec<Peer>>,
    keyed: bool,
}

/// An entry of `--pd-peers` that is no `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pd-peers: {0}")]
pub struct PeerListError(#[from] AddressError);

impl PeerListError {
    /// What is wrong with the entry.
    pub(crate) fn problem(&self) -> &str {
        &self.0.problem
    }
}

impl Peer {
    /// Reads `host:port`; an IPv6 address stands in brackets.
    pub fn parse(text: &str) -> Result<Self, PeerListError> {
        let HostPort { host, port } = text.parse()?;
        let peer = Self::new(host, port).ok_or_else(|| AddressError {
            element: text.to_owned(),
            problem: "has a wildcard for a host, which nobody can dial".to_owned(),
        })?;
        Ok(peer)
    }

    /// None for a wildcard.
    pub(crate) fn new(host: Host, port: u16) -> Option<Self> {
        let host = match host {
            Host::Ip(address) => Host::Ip(address.to_canonical()),
            name => name,
        };
        (!host.is_wildcard()).then_some(Self(HostPort { host, port }))
    }

    /// Name or address, without brackets.
    pub fn host(&self) -> String {
        match &self.0.host {
            Host::Ip(address) => address.to_string(),
            Host::Name(name) => name.clone(),
        }
    }

    /// Port, not 0.
    pub fn port(&self) -> u16 {
        self.0.port
    }

    /// The address, if the host is one or is `localhost`.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        address(&self.0.host)
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.address().is_some_and(|address| address.is_loopback())
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PeerList {
    /// `entries` empty: any peer on loopback, none elsewhere. Without a peer key entries elsewhere are
    /// kept, but refused when they are used.
    pub(crate) fn new(entries: &[String], keyed: bool) -> Result<Self, PeerListError> {
        let peers: Vec<Peer> = entries
            .iter()
            .map(|entry| Peer::parse(entry.trim()))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            listed: (!peers.is_empty()).then_some(peers),
            keyed,
        })
    }

    /// The peer, if it may be dialled.
    ///
    /// Errors: [`ErrorKind::KvParamsForbidden`].
    pub(crate) fn allow(&self, host: &str, port: u16) -> Result<Peer, ApiError> {
        let listed = |peer: &Peer| match &self.listed {
            Some(listed) => listed.contains(peer),
            None => port != 0 && peer.is_loopback(),
        };
        let peer = Host::parse(host)
            .ok()
            .and_then(|host| Peer::new(host, port))
            .filter(listed)
            .ok_or_else(|| {
                let allowed = match self.listed {
                    Some(_) => "the peers that --pd-peers lists",
                    None => "addresses of loopback, since --pd-peers lists no peers",
                };
                forbidden(host, port, allowed)
            })?;
        // A name may still turn out to be elsewhere: the one who dials checks again.
        if !self.keyed && peer.address().is_some_and(|address| !address.is_loopback()) {
            let allowed = "addresses of loopback, since this instance has no peer key";
            return Err(forbidden(host, port, allowed));
        }
        Ok(peer)
    }
}

fn forbidden(host: &str, port: u16, allowed: &str) -> ApiError {
    let param = "kv_transfer_params.remote_host";
    let host = shown(host);
    let message = format!("{param} is {host:?} (port {port}); allowed are {allowed}");
    ApiError::new(ErrorKind::KvParamsForbidden, message).with_param(param)
}

/// The address that `host` is, or means on every node.
pub(crate) fn address(host: &Host) -> Option<IpAddr> {
    match host {
        Host::Ip(address) => Some(*address),
        Host::Name(name) => (name == "localhost").then_some(IpAddr::from([127, 0, 0, 1])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn list(entries: &[&str], keyed: bool) -> PeerList {
        let entries: Vec<String> = entries.iter().map(|&entry| entry.to_owned()).collect();
        PeerList::new(&entries, keyed).unwrap()
    }

    fn allowed(list: &PeerList, host: &str, port: u16) -> bool {
        match list.allow(host, port) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::KvParamsForbidden);
                false
            }
        }
    }

    #[test]
    fn without_a_list_only_loopback_is_dialled() {
        for keyed in [true, false] {
            let list = list(&[], keyed);
            for host in [
                "127.0.0.1",
                "127.9.9.9",
                "::1",
                "localhost",
                "LOCALHOST",
                "::ffff:127.0.0.1",
                "[::1]",
                "localhost.",
            ] {
                assert!(allowed(&list, host, 9), "{host}");
            }
            for host in [
                "169.254.169.254",
                "10.0.0.1",
                "0.0.0.0",
                "::",
                "example.org",
                "",
                "127.0.0.1.example.org",
                "127.1",
                "2130706433",
                "0x7f000001",
                "::ffff:10.0.0.1",
                "[10.0.0.1]",
                "127.0.0.1:80",
                " 127.0.0.1",
            ] {
                assert!(!allowed(&list, host, 9), "{host}");
            }
            assert!(!allowed(&list, "127.0.0.1", 0));
        }
    }

    #[test]
    fn with_a_list_only_its_entries_are_dialled() {
        let list = list(
            &["10.0.0.1:7000", " P.Example.org:7001 ", "[fd00::1]:7002"],
            true,
        );
        assert!(allowed(&list, "10.0.0.1", 7000));
        assert!(allowed(&list, "p.example.ORG", 7001));
        assert!(allowed(&list, "fd00:0::1", 7002));
        for (host, port) in [
            ("10.0.0.1", 7001),
            ("127.0.0.1", 22),
            ("localhost", 7000),
            ("10.0.0.10", 7000),
        ] {
            assert!(!allowed(&list, host, port), "{host}:{port}");
        }
    }

    #[test]
    fn without_a_key_a_listed_peer_elsewhere_is_refused() {
        assert!(!allowed(&list(&["10.0.0.1:7000"], false), "10.0.0.1", 7000));
        assert!(allowed(
            &list(&["127.0.0.1:7000"], false),
            "127.0.0.1",
            7000
        ));
    }

    #[test]
    fn entries_that_are_no_peer_are_named() {
        for bad in [
            "",
            "host",
            "host:",
            "host:0",
            "host:65536",
            ":1",
            "::1:80",
            "[host]:80",
            "0.0.0.0:1",
            "[::]:1",
            "a b:1",
            "http://a:1",
        ] {
            let error = PeerList::new(&[bad.to_owned()], true).unwrap_err();
            assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn a_peer_is_written_as_it_is_read() {
        for text in ["10.0.0.1:7000", "[fd00::1]:7002", "host:1"] {
            assert_eq!(Peer::parse(text).unwrap().to_string(), text);
        }
    }

    proptest! {
        /// Whatever is asked for, without a list only loopback comes out.
        #[test]
        fn nothing_but_loopback_comes_out(host in "[0-9a-f:.%x]{0,24}|.{0,24}", port in any::<u16>()) {
            if let Ok(peer) = list(&[], true).allow(&host, port) {
                prop_assert!(peer.address().is_some_and(|address| address.is_loopback()) && peer.port() != 0);
            }
            let _ = Peer::parse(&format!("{host}:{port}"));
        }
    }
}
