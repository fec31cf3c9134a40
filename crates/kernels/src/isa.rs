//! Choice of the instruction set.

/// An instruction set the running processor has; only [`Isa::detect`] and [`Isa::available`] make one.
///
/// All give the same bits; they differ in speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(pub(crate) Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// AVX-512 with VNNI and BF16.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// The fastest instruction set of this processor, or the one named by `wanted` (`avx512`, `avx2`, `portable`; the
    /// program reads it from `TWINFER_ISA`).
    ///
    /// # Errors
    /// A message when the name is unknown or the processor lacks it.
    pub fn detect(wanted: Option<&str>) -> Result<Self, String> {
        let available = Self::available();
        let names = || {
            available
                .iter()
                .map(|isa| isa.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        match wanted {
            None => Ok(available.first().copied().unwrap_or(Self(Kind::Portable))),
            Some(name) => available
                .iter()
                .copied()
                .find(|isa| isa.name() == name)
                .ok_or_else(|| {
                    if ["avx512", "avx2", "portable"].contains(&name) {
                        format!(
                            "TWINFER_ISA={name}: this processor does not have it; it has {}",
                            names()
                        )
                    } else {
                        format!("TWINFER_ISA={name}: unknown; permitted are avx512, avx2, portable")
                    }
                }),
        }
    }

    /// All instruction sets of this processor with kernels, fastest first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                let bf16 = is_x86_feature_detected!("avx512bf16");
                found.push(Self(if bf16 { Kind::Avx512Bf16 } else { Kind::Avx512 }));
            }
            if avx2 {
                found.push(Self(Kind::Avx2));
            }
        }
        found.push(Self(Kind::Portable));
        found
    }

    /// The fastest instruction set of this processor.
    pub(crate) fn best() -> Self {
        Self::detect(None).unwrap_or(Self(Kind::Portable))
    }

    /// This instruction set without bf16 dot products, for tests of what replaces them.
    #[doc(hidden)]
    pub fn without_bf16(self) -> Self {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512Bf16 => Self(Kind::Avx512),
            other => Self(other),
        }
    }

    /// A rough speed of one core, for cutting work into tasks.
    pub(crate) fn products_per_nanosecond(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 | Kind::Avx512Bf16 => 40,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => 30,
            // x86-64 without FMA calls a function for every product.
            Kind::Portable if cfg!(target_arch = "x86_64") => 1,
            Kind::Portable => 10,
        }
    }

    /// A rough number of lines of packed weights that one core multiplies by one row per microsecond.
    pub(crate) fn lines_per_microsecond(self, bf16: bool) -> usize {
        match (self.0, bf16) {
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512Bf16 | Kind::Avx512, false) | (Kind::Avx512Bf16, true) => 3000,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, true) => 1500,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, false) => 1200,
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, true) => 900,
            (Kind::Portable, _) => 100,
        }
    }

    /// `avx512`, `avx2` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 | Kind::Avx512Bf16 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            Kind::Portable => "portable",
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_and_unknown_names_say_what_is_permitted() {
        assert_eq!(Isa::detect(None).unwrap(), Isa::available()[0]);
        for isa in Isa::available() {
            assert_eq!(Isa::detect(Some(isa.name())).unwrap(), isa);
        }
        let message = Isa::detect(Some("sse9")).unwrap_err();
        assert!(
            message.contains("sse9") && message.contains("avx512, avx2, portable"),
            "{message}"
        );
        assert!(Isa::detect(Some("")).is_err());
    }
}
