use http::{HeaderMap, HeaderValue, header::AUTHORIZATION};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq;
use twinfer_config::KeyVariable;
use twinfer_protocol::{ApiError, ErrorKind};

/// Longest key, in bytes.
const MAX_LEN: usize = 4096;

/// A key. It is compared and sent, never printed.
#[derive(Clone)]
pub struct Secret(Box<str>);

/// A key that cannot be used. The message never contains it.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file could not be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Others may read the file.
    #[error(
        "{path} has mode {mode:04o}; a key file must not be accessible to group or others (chmod 600)"
    )]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file of a flag.
    #[error("--{flag}: {source}")]
    Flag {
        /// Name of the flag, without hyphens in front.
        flag: &'static str,
        /// What is wrong.
        source: Box<SecretError>,
    },
    /// The key is not a usable bearer token.
    #[error(
        "the key in {origin} is {problem}; allowed are 1 to 4096 printable ASCII characters without spaces"
    )]
    Unusable {
        /// File or environment variable.
        origin: String,
        /// What is wrong.
        problem: &'static str,
    },
}

impl Secret {
    /// A key from its text; `origin` is named in the error.
    ///
    /// # Errors
    /// [`SecretError::Unusable`].
    pub fn new(text: &str, origin: &str) -> Result<Self, SecretError> {
        let problem = match text {
            "" => Some("empty"),
            t if t.len() > MAX_LEN => Some("too long"),
            t if !t.bytes().all(|b| b.is_ascii_graphic()) => Some("not printable ASCII"),
            _ => None,
        };
        match problem {
            Some(problem) => Err(SecretError::Unusable {
                origin: origin.to_owned(),
                problem,
            }),
            None => Ok(Self(text.into())),
        }
    }

    /// The content of a file of mode 0600 (or 0400); white space around it is not part of the key.
    ///
    /// # Errors
    /// Every variant of [`SecretError`].
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let read = |source| SecretError::Read {
            path: path.to_owned(),
            source,
        };
        let mode = std::fs::metadata(path).map_err(read)?.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(SecretError::Mode {
                path: path.to_owned(),
                mode,
            });
        }
        let text = std::fs::read_to_string(path).map_err(read)?;
        Self::new(text.trim(), &path.display().to_string())
    }

    /// The file that `flag` names if it is given, else the environment variable, else none.
    ///
    /// # Errors
    /// [`SecretError::Flag`] for a file, [`SecretError::Unusable`] for a variable.
    pub fn load(
        flag: &'static str,
        file: Option<&Path>,
        variable: Option<&KeyVariable>,
    ) -> Result<Option<Self>, SecretError> {
        if let Some(path) = file {
            return Self::from_file(path)
                .map(Some)
                .map_err(|source| SecretError::Flag {
                    flag,
                    source: Box::new(source),
                });
        }
        variable
            .map(|KeyVariable { name, value }| Self::new(value, &format!("variable {name}")))
            .transpose()
    }

    /// The key's bytes, for a MAC.
    pub fn expose(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Are these the key's bytes? Takes the same time wherever they differ.
    pub fn matches(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }

    /// `Bearer <key>`, marked so that it is not printed either.
    pub fn bearer(&self) -> HeaderValue {
        // The characters were checked when the key was made.
        let mut value = HeaderValue::try_from(format!("Bearer {}", self.0))
            .unwrap_or_else(|_| HeaderValue::from_static("Bearer"));
        value.set_sensitive(true);
        value
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// Does the request present the key? No key configured: everybody may.
///
/// # Errors
/// [`ErrorKind::Unauthorized`]; the message does not repeat what was presented.
pub fn check_bearer(headers: &HeaderMap, key: Option<&Secret>) -> Result<(), ApiError> {
    let Some(key) = key else { return Ok(()) };
    let refuse = |message: &str| Err(ApiError::new(ErrorKind::Unauthorized, message));
    let Some(value) = headers.get(AUTHORIZATION) else {
        return refuse("this route needs a key: Authorization: Bearer <key>");
    };
    let token = value
        .as_bytes()
        .split_at_checked(7)
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "));
    match token {
        Some((_, token)) if key.matches(token.trim_ascii()) => Ok(()),
        _ => refuse("the key in the Authorization header is wrong"),
    }
}
