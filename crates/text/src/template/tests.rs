use super::*;

fn user(text: &str) -> Json {
    json!([{"role": "user", "content": text}])
}
