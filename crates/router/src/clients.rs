//! Keys of clients, apart from those of instances: one for all, or one each.

use crate::RouterError;
use crate::gate::Client;
use http::HeaderMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use twinfer_config::RouterConfig;
use twinfer_http::{Secret, check_bearer};
use twinfer_protocol::ApiError;

/// Most keys of a file: each is compared with what a request presents.
const MAX_KEYS: usize = 1024;

/// Who may ask.
#[derive(Debug, Default)]
pub(crate) struct ClientKeys {
    /// None: everybody.
    keys: Vec<(String, Secret)>,
}

impl ClientKeys {
    pub(crate) fn load(config: &RouterConfig) -> Result<Self, RouterError> {
        let problem = |text: String| RouterError::Config(vec![text]);
        let Some(path) = &config.api_keys_file else {
            let one = Secret::load(
                "api-key-file",
                config.api_key_file.as_deref(),
                config.environment_keys.api.as_ref(),
            )?;
            return Ok(Self {
                keys: one
                    .map(|key| ("client".to_owned(), key))
                    .into_iter()
                    .collect(),
            });
        };
        if config.api_key_file.is_some() {
            let text = "--api-key-file and --api-keys-file are given; one is allowed";
            return Err(problem(text.to_owned()));
        }
        let keys = Self::read(path).map_err(|text| problem(format!("--api-keys-file: {text}")))?;
        Ok(Self { keys })
    }

    /// Errors name the line, never a key.
    fn read(path: &Path) -> Result<Vec<(String, Secret)>, String> {
        let shown = path.display();
        let mode = std::fs::metadata(path)
            .map_err(|error| format!("{shown}: {error}"))?
            .mode();
        if mode & 0o077 != 0 {
            let mode = mode & 0o7777;
            return Err(format!(
                "{shown} has mode {mode:04o}; a key file must not be accessible to group or others (chmod 600)"
            ));
        }
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        let mut keys: Vec<(String, Secret)> = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let place = format!("{shown}:{}", index + 1);
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some((name, key)) = line.split_once(char::is_whitespace) else {
                return Err(format!("{place}: a name and a key are expected"));
            };
            let key = Secret::new(key.trim(), &place).map_err(|error| error.to_string())?;
            if keys.iter().any(|(other, _)| other == name) {
                return Err(format!("{place}: {name:?} was given before"));
            }
            keys.push((name.to_owned(), key));
        }
        match keys.len() {
            1..=MAX_KEYS => Ok(keys),
            n => Err(format!("{shown} has {n} keys; 1 to {MAX_KEYS} are allowed")),
        }
    }

    /// Who presents a key.
    ///
    /// # Errors
    /// `Unauthorized`.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Client, ApiError> {
        let Some((_, first)) = self.keys.first() else {
            return Ok(0);
        };
        let mut found = None;
        // All are looked at, so that the time tells nothing.
        for (index, (_, key)) in self.keys.iter().enumerate() {
            if check_bearer(headers, Some(key)).is_ok() {
                found = Client::try_from(index).ok();
            }
        }
        match found {
            Some(client) => Ok(client),
            None => check_bearer(headers, Some(first)).map(|()| 0),
        }
    }

    /// The name of a client, for logs.
    pub(crate) fn name(&self, client: Client) -> &str {
        let named = self.keys.get(client as usize);
        named.map_or("", |(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use http::header::AUTHORIZATION;
    use std::os::unix::fs::PermissionsExt as _;

    fn file(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(file.path(), mode).expect("a mode");
        file
    }

    #[test]
    fn each_key_is_a_client_of_its_own() {
        let file = file("# team keys\nred key-of-red\nblue  key-of-blue\n", 0o600);
        let keys = ClientKeys {
            keys: ClientKeys::read(file.path()).expect("keys"),
        };
        let with = |key: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, HeaderValue::from_static(key));
            keys.check(&headers)
        };
        assert_eq!(with("Bearer key-of-red").expect("red"), 0);
        let blue = with("Bearer key-of-blue").expect("blue");
        assert_eq!((blue, keys.name(blue)), (1, "blue"));
        assert!(with("Bearer key-of-green").is_err());
        assert!(keys.check(&HeaderMap::new()).is_err());
        assert_eq!(
            ClientKeys::default()
                .check(&HeaderMap::new())
                .expect("open"),
            0
        );
    }

    #[test]
    fn a_bad_file_is_refused_without_telling_keys() {
        for (text, mode, said) in [
            ("red secret-1", 0o644, "0644"),
            ("red", 0o600, ":1: a name and a key"),
            (
                "red secret-1\nred secret-2",
                0o600,
                ":2: \"red\" was given before",
            ),
            ("red secret 1", 0o600, "not printable"),
            ("", 0o600, "has 0 keys"),
        ] {
            let file = file(text, mode);
            let error = ClientKeys::read(file.path()).expect_err(text);
            assert!(error.contains(said) && !error.contains("secret"), "{error}");
        }
    }
}
