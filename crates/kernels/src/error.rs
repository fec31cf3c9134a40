//! Errors of kernels.

/// Why a kernel did not run to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KernelError {
    /// Lengths, counts or ranges of the arguments do not fit together. Nothing was written.
    Shape(String),
    /// A task panicked; outputs are incomplete. Holds the panic's message.
    Panicked(String),
}

impl std::fmt::Display for KernelError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Shape(what) => write!(f, "shape mismatch: {what}"),
            Self::Panicked(message) => write!(f, "a compute task panicked: {message}"),
        }
    }
}

impl std::error::Error for KernelError {}

/// Fails with [`KernelError::Shape`] unless `condition` holds.
macro_rules! ensure_shape {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err($crate::KernelError::Shape(format!($($message)*)));
        }
    };
}
pub(crate) use ensure_shape;
