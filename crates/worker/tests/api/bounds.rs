//! Bounds of flags stand in the schema of files and in the check of an instance: they must be the same.

use serde_json::{Value, json};
use twinfer_config::ServeConfig;
use twinfer_worker::validate;

/// `max-body-bytes` had bounds in the check and none in the schema.
#[test]
fn the_schema_has_the_bounds_that_an_instance_checks() {
    let schema = schemars::schema_for!(ServeConfig).to_value();
    let refusal = |flag: &str, value: &Value| {
        let mut config = serde_json::to_value(crate::support::config()).unwrap();
        config[flag] = value.clone();
        let config: ServeConfig = serde_json::from_value(config).unwrap();
        validate(&config).err().map(|error| error.to_string())
    };
    // A flag may be refused for another reason, such as that it needs another one.
    let out_of_bounds = |flag: &str, value: &Value| {
        refusal(flag, value).is_some_and(|text| text.starts_with(&format!("{flag} is ")))
    };
    let mut bounded = 0;
    for (flag, of) in schema["properties"].as_object().unwrap() {
        let kind = &of["type"];
        let is = |name: &str| kind == name || kind[0] == name;
        // A port is bounded by its type.
        if !(is("integer") || is("number")) || of["format"] == "uint16" {
            continue;
        }
        let widest = if of["format"] == "uint32" {
            u64::from(u32::MAX)
        } else {
            u64::MAX
        };
        let (least, most) = (&of["minimum"], &of["maximum"]);
        if let Some(least) = least.as_f64().filter(|least| *least > 0.0) {
            let below = json!(least as u64 - 1);
            assert!(out_of_bounds(flag, &below), "{flag} {below}");
            bounded += 1;
        }
        match most.as_f64() {
            Some(most) => {
                let above = json!(most as u64 + 1);
                assert!(out_of_bounds(flag, &above), "{flag} {above}");
                bounded += 1;
            }
            None if is("integer") => {
                let text = refusal(flag, &json!(widest)).unwrap_or_default();
                assert!(
                    !text.contains("are allowed"),
                    "{flag} has no maximum: {text}"
                );
            }
            None => panic!("{flag} has no maximum"),
        }
        for end in [least, most].into_iter().filter(|end| end.is_number()) {
            let end = if is("integer") {
                json!(end.as_f64().unwrap() as u64)
            } else {
                end.clone()
            };
            let text = refusal(flag, &end).unwrap_or_default();
            assert!(!text.contains("are allowed"), "{flag} {end}: {text}");
        }
    }
    assert!(bounded > 15, "{bounded}");
}
