use std::fmt;
use twinfer_protocol::{ADMIN_KEY_ENV, API_KEY_ENV, PEER_KEY_ENV, PEER_KEY_ENV_COMPAT};

/// Keys that the environment gives a process. Read by the binary; libraries get the values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnvironmentKeys {
    /// For clients.
    pub api: Option<KeyVariable>,
    /// For other instances and routers.
    pub peer: Option<KeyVariable>,
    /// For the router's admin listener.
    pub admin: Option<KeyVariable>,
}

/// An environment variable that holds a key; the value is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyVariable {
    /// Name.
    pub name: &'static str,
    /// Key, not empty.
    pub value: String,
}

impl EnvironmentKeys {
    /// Asks for the variables by name; of several for one key the first that is set and not empty counts.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Self {
        let first = |names: &[&'static str]| {
            names.iter().find_map(|name| {
                let value = variable(name).filter(|value| !value.is_empty())?;
                Some(KeyVariable { name, value })
            })
        };
        Self {
            api: first(&[API_KEY_ENV]),
            peer: first(&[PEER_KEY_ENV, PEER_KEY_ENV_COMPAT]),
            admin: first(&[ADMIN_KEY_ENV]),
        }
    }
}

impl fmt::Debug for KeyVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_is_set_counts_and_no_key_is_printed() {
        let given = |name: &str| match name {
            PEER_KEY_ENV => Some(String::new()),
            PEER_KEY_ENV_COMPAT => Some("secret".to_owned()),
            _ => None,
        };
        let keys = EnvironmentKeys::read(given);
        assert_eq!(keys.api, None);
        let peer = keys.peer.clone().unwrap();
        assert_eq!(
            (peer.name, peer.value.as_str()),
            ("OPENAI_API_KEY", "secret")
        );
        assert!(!format!("{keys:?}").contains("secret"));
    }
}
