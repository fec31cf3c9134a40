use twinfer_protocol::ApiError;

/// Why an instance did not start, or ended before it was told to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A flag has a value that cannot be served.
    #[error(transparent)]
    Flag(#[from] twinfer_config::FlagError),
    /// Flags that contradict each other, or an address that cannot be used.
    #[error("{0}")]
    Config(String),
    /// A key file or variable cannot be used.
    #[error(transparent)]
    Key(#[from] twinfer_http::SecretError),
    /// An address cannot be listened on.
    #[error("{what}: {reason}")]
    Bind {
        /// `HTTP` or `KV handoff`, and the flag.
        what: &'static str,
        /// Address and reason.
        reason: String,
    },
    /// The model was refused or could not be read.
    #[error("{0}")]
    Model(String),
    /// Threads, signals or memory could not be had.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// The engine failed while it ran.
    #[error("the instance cannot go on: {0}")]
    Engine(ApiError),
}

/// What an exit code says about a [`ServeError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum ExitClass {
    /// Flags, keys or model must change.
    Config,
    /// A port is taken or an address is not of this host.
    Unavailable,
    /// A failure of this process or machine.
    Internal,
}

impl ServeError {
    /// Class of the exit code.
    pub fn exit_class(&self) -> ExitClass {
        match self {
            Self::Flag(_) | Self::Config(_) | Self::Key(_) | Self::Model(_) => ExitClass::Config,
            Self::Bind { .. } => ExitClass::Unavailable,
            Self::System { .. } | Self::Engine(_) => ExitClass::Internal,
        }
    }
}
