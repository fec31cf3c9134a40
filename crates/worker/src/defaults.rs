use serde_json::Value;
use twinfer_engine::SamplingParams;
use twinfer_protocol::TokenId;
use twinfer_protocol::openai::SamplingOptions;
use twinfer_text::ModelTexts;

/// Sampling of requests that do not say otherwise: generation_config.json, else temperature 1 and
/// nothing cut (as vLLM).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// `temperature`.
    pub temperature: f32,
    /// `top_p`.
    pub top_p: f32,
    /// `top_k`, 0 is off.
    pub top_k: u32,
    /// `min_p`.
    pub min_p: f32,
    /// `repetition_penalty`.
    pub repetition_penalty: f32,
    /// `max_new_tokens`: output tokens of a request that leaves their number open; a request may ask for more.
    pub max_tokens: Option<u32>,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            max_tokens: None,
        }
    }
}

impl SamplingDefaults {
    /// Those of a model; it may have none.
    ///
    /// Errors: generation_config.json cannot be read, is not JSON, or has a number that is none or out
    /// of range.
    pub fn of(texts: &ModelTexts) -> Result<Self, String> {
        const NAME: &str = "generation_config.json";
        let config = texts.json(NAME).map_err(|error| error.to_string())?;
        Self::from_json(&config).map_err(|error| format!("{}: {error}", texts.path(NAME).display()))
    }

    fn from_json(config: &Value) -> Result<Self, String> {
        let base = Self::default();
        let number = |name: &str, default: f32| match &config[name] {
            Value::Null => Ok(default),
            value => value
                .as_f64()
                .map(|v| v as f32)
                .ok_or_else(|| format!("{name} is {value}; a number is expected")),
        };
        let top_k = match &config["top_k"] {
            Value::Null => base.top_k,
            value if value.as_i64() == Some(-1) => 0,
            value => value
                .as_u64()
                .and_then(|k| u32::try_from(k).ok())
                .ok_or_else(|| {
                    format!("top_k is {value}; -1, 0 or a number of tokens is expected")
                })?,
        };
        let max_tokens = match &config["max_new_tokens"] {
            Value::Null => None,
            value => Some(
                value
                    .as_u64()
                    .and_then(|tokens| u32::try_from(tokens).ok())
                    .filter(|tokens| *tokens > 0)
                    .ok_or_else(|| {
                        format!("max_new_tokens is {value}; a number of tokens from 1 is expected")
                    })?,
            ),
        };
        let defaults = Self {
            temperature: number("temperature", base.temperature)?,
            top_p: number("top_p", base.top_p)?,
            top_k,
            min_p: number("min_p", base.min_p)?,
            repetition_penalty: number("repetition_penalty", base.repetition_penalty)?,
            max_tokens,
        };
        // Better here than in an error to every client.
        defaults
            .params(&SamplingOptions::default(), Vec::new(), 0, 0, 1, None)
            .validate(1)
            .map_err(|e| e.message)?;
        Ok(defaults)
    }

    /// What the engine is told of a choice of a request; `bad_words` are the tokens of those of `options`.
    pub(crate) fn params(
        &self,
        options: &SamplingOptions,
        bad_words: Vec<Vec<TokenId>>,
        seed: u64,
        choice: u32,
        max_tokens: u32,
        logprobs: Option<u32>,
    ) -> SamplingParams {
        SamplingParams {
            temperature: options.temperature.unwrap_or(self.temperature),
            top_p: options.top_p.unwrap_or(self.top_p),
            top_k: options.top_k.unwrap_or(self.top_k),
            min_p: options.min_p.unwrap_or(self.min_p),
            repetition_penalty: options
                .repetition_penalty
                .unwrap_or(self.repetition_penalty),
            frequency_penalty: options.frequency_penalty.unwrap_or(0.0),
            presence_penalty: options.presence_penalty.unwrap_or(0.0),
            logit_bias: options.logit_bias.clone(),
            bad_words,
            allowed_token_ids: options.allowed_token_ids.clone(),
            seed: options.seed.unwrap_or(seed),
            choice,
            max_tokens,
            min_tokens: options.min_tokens,
            ignore_eos: options.ignore_eos,
            stop: options.stop.clone(),
            stop_token_ids: options.stop_token_ids.clone(),
            include_stop_str_in_output: options.include_stop_str_in_output,
            logprobs,
            // Those of the request belong to its first choice.
            prompt_logprobs: None,
            skip_special_tokens: options.skip_special_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn generation_config_is_the_default() {
        let given = json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 1, "do_sample": true,
            "max_new_tokens": 2048, "max_length": 20});
        let defaults = SamplingDefaults::from_json(&given).unwrap();
        assert_eq!(
            (defaults.temperature, defaults.top_p, defaults.top_k),
            (0.6, 0.95, 20)
        );
        assert_eq!(defaults.max_tokens, Some(2048));
        assert_eq!(
            SamplingDefaults::from_json(&json!({})).unwrap(),
            SamplingDefaults::default()
        );
    }

    #[test]
    fn bad_numbers_in_generation_config_are_named() {
        for (config, name) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"temperature": -1.0}), "temperature"),
            (json!({"top_p": 2.0}), "top_p"),
            (json!({"top_k": -5}), "top_k"),
            (json!({"max_new_tokens": 0}), "max_new_tokens"),
            (json!({"max_new_tokens": 2.5}), "max_new_tokens"),
        ] {
            assert!(
                SamplingDefaults::from_json(&config)
                    .unwrap_err()
                    .contains(name)
            );
        }
    }
}
