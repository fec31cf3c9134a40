use http::HeaderMap;
use http::header::AUTHORIZATION;
use proptest::prelude::*;
use std::os::unix::fs::PermissionsExt;
use twinfer_config::KeyVariable;
use twinfer_http::{
    Endpoint, Host, HostPort, METRICS_CONTENT_TYPE, Metrics, SECONDS_INTER_TOKEN, SECONDS_REQUEST,
    SECONDS_TTFT, Secret, SecretError, TOKENS, check_bearer, error_response,
};
use twinfer_protocol::{ApiError, ErrorKind};

#[test]
fn good_addresses_are_read_and_printed_as_given() {
    for text in [
        "127.0.0.1:80",
        "[2001:db8::1]:7100",
        "node-1.example:65535",
        "localhost:1",
        "a_b:9",
    ] {
        assert_eq!(text.parse::<HostPort>().unwrap().to_string(), text);
        let url = format!("http://{text}");
        assert_eq!(url.parse::<Endpoint>().unwrap().to_string(), url);
        assert_eq!(
            format!("HTTP://{text}/")
                .parse::<Endpoint>()
                .unwrap()
                .to_string(),
            url
        );
    }
    assert_eq!(
        HostPort::from_parts("2001:db8::1", "7100")
            .unwrap()
            .to_string(),
        "[2001:db8::1]:7100"
    );
    assert_eq!(
        "Node.Example:80".parse::<HostPort>().unwrap(),
        "node.example:80".parse().unwrap()
    );
}

#[test]
fn bad_addresses_are_named_with_what_is_wrong() {
    for (text, problem) in [
        ("192.0.2.3192.0.2.4:80", "not an IPv4 address"),
        ("192.0.2.300:80", "not an IPv4 address"),
        ("1234:80", "not an IPv4 address"),
        ("", "is empty"),
        ("  ", "is empty"),
        (":80", "has no host"),
        ("host", "has no port"),
        ("host:", "has port \"\""),
        ("host:0", "has port \"0\""),
        ("host:70000", "has port \"70000\""),
        ("host:+80", "has port \"+80\""),
        ("host:abc", "has port \"abc\""),
        ("host:80:90", "brackets"),
        ("::1:80", "brackets"),
        ("[::1]", "has no port"),
        ("[::g]:80", "IPv6 address in brackets"),
        ("ho st:80", "host name"),
        ("-host:80", "host name"),
        ("a..b:80", "host name"),
        ("user@host:80", "host name"),
    ] {
        let error = text.parse::<HostPort>().unwrap_err();
        assert_eq!(error.element, text);
        assert!(
            error.to_string().contains(&format!("{text:?}")) && error.problem.contains(problem),
            "{error}"
        );
        assert!(
            format!("http://{text}").parse::<Endpoint>().is_err(),
            "{text}"
        );
    }
    for (text, problem) in [
        ("host:80", "no scheme"),
        ("https://host:80", "other than http"),
        ("ftp://host:80", "other than http"),
        ("http://user:pw@host:80", "user information"),
        ("http://host:80/v1", "path"),
        ("http://host:80?x=1", "path"),
        ("http://host:80#x", "path"),
        ("http://host", "no port"),
        ("http://", "empty"),
    ] {
        let error = text.parse::<Endpoint>().unwrap_err();
        assert!(
            error.element == text && error.problem.contains(problem),
            "{error}"
        );
    }
}

#[test]
fn loopback_and_wildcard_are_known() {
    for (text, loopback, wildcard) in [
        ("127.8.8.8", true, false),
        ("::1", true, false),
        ("localhost", true, false),
        ("0.0.0.0", false, true),
        ("[::]", false, true),
        ("10.0.0.1", false, false),
        ("localhost.example", false, false),
    ] {
        let host = Host::parse(text).unwrap();
        assert_eq!(
            (host.is_loopback(), host.is_wildcard()),
            (loopback, wildcard),
            "{text}"
        );
    }
}

proptest! {
    #[test]
    fn no_text_panics_and_what_is_accepted_is_stable(text in "(http://)?[\\[\\]:/@?#.a-z0-9%\\PC]{0,24}") {
        if let Ok(endpoint) = text.parse::<Endpoint>() {
            prop_assert_eq!(endpoint.to_string().parse::<Endpoint>().unwrap(), endpoint);
        }
        if let Ok(address) = text.parse::<HostPort>() {
            prop_assert_eq!(address.to_string().parse::<HostPort>().unwrap(), address);
        }
    }
}

#[test]
fn keys_come_from_private_files_and_are_never_printed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, " s3cret-key\n").unwrap();
    let mode =
        |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    for good in [0o600, 0o400] {
        mode(good);
        let secret = Secret::from_file(&path).unwrap();
        assert_eq!(secret.expose(), b"s3cret-key");
        assert!(
            secret.matches(b"s3cret-key")
                && !secret.matches(b"s3cret-kez")
                && !secret.matches(b"s3cret")
        );
        assert!(!format!("{secret:?} {:?}", secret.bearer()).contains("s3cret"));
    }
    for bad in [0o640, 0o604, 0o777, 0o610] {
        mode(bad);
        assert!(
            matches!(Secret::from_file(&path), Err(SecretError::Mode { mode, .. }) if mode == bad)
        );
    }
    mode(0o600);
    for content in ["", "\n", "two words", "schlüssel", &"x".repeat(5000)] {
        std::fs::write(&path, content).unwrap();
        let message = Secret::from_file(&path).unwrap_err().to_string();
        assert!(
            message.contains("key") && (content.trim().is_empty() || !message.contains(content)),
            "{message}"
        );
    }
    let missing = dir.path().join("missing");
    assert!(matches!(
        Secret::from_file(&missing),
        Err(SecretError::Read { .. })
    ));
    let flag = "api-key-file";
    let message = Secret::load(flag, Some(&missing), None)
        .unwrap_err()
        .to_string();
    assert!(message.starts_with("--api-key-file: "), "{message}");
    assert!(message.contains("missing"), "{message}");
    assert!(Secret::load(flag, None, None).unwrap().is_none());
    let variable = |value: &str| KeyVariable {
        name: "TWINFER_API_KEY",
        value: value.to_owned(),
    };
    let set = Secret::load(flag, None, Some(&variable("from-outside"))).unwrap();
    assert_eq!(set.unwrap().expose(), b"from-outside");
    let message = Secret::load(flag, None, Some(&variable("two words")))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("variable TWINFER_API_KEY") && !message.contains("two"),
        "{message}"
    );
    std::fs::write(&path, "from-file").unwrap();
    let file = Secret::load(flag, Some(&path), Some(&variable("from-outside"))).unwrap();
    assert_eq!(file.unwrap().expose(), b"from-file");
}

#[test]
fn only_the_right_bearer_token_passes() {
    let key = Secret::new("right", "test").unwrap();
    let check = |value: Option<&str>| {
        let mut headers = HeaderMap::new();
        value
            .iter()
            .for_each(|v| drop(headers.insert(AUTHORIZATION, v.parse().unwrap())));
        check_bearer(&headers, Some(&key))
    };
    for good in ["Bearer right", "bearer right", "BEARER  right "] {
        assert!(check(Some(good)).is_ok(), "{good}");
    }
    for bad in [
        None,
        Some("Bearer wrong"),
        Some("Bearer "),
        Some("Bearer rightx"),
        Some("Basic right"),
        Some("right"),
        Some("Bearer"),
        Some("Bearerxright"),
    ] {
        let error = check(bad).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unauthorized);
        assert!(
            !error.message.contains("right") && !error.message.contains("wrongx"),
            "{}",
            error.message
        );
    }
    assert!(check_bearer(&HeaderMap::new(), None).is_ok());
}

#[test]
fn errors_become_answers_with_all_headers() {
    let error = ApiError::new(ErrorKind::Overloaded, "queue full").with_param("n");
    let response = error_response::<bytes::Bytes>(&error);
    let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(response.status(), 429);
    assert_eq!(header("retry-after"), "1");
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("content-length"), response.body().len().to_string());
    let body = r#"{"error":{"message":"queue full","type":"rate_limit_error","param":"n","code":"overloaded"}}"#;
    assert_eq!(response.body(), body);
    let plain = error_response::<bytes::Bytes>(&ApiError::new(ErrorKind::Internal, "x"));
    assert_eq!(
        (plain.status().as_u16(), plain.headers().get("retry-after")),
        (500, None)
    );
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelSet)]
struct Labels {
    code: &'static str,
}

#[test]
fn metrics_are_written_in_the_classic_text_format() {
    let metrics = Metrics::new();
    metrics
        .counter("vllm:prompt_tokens_total", "Prompt tokens.")
        .inc_by(3);
    let running = metrics.gauge("vllm:num_requests_running", "Running");
    let ttft = metrics.histogram("vllm:time_to_first_token_seconds", "TTFT", &[0.5, 1.0]);
    let errors = metrics.counters::<Labels>("twinfer_errors", "Errors by code");
    running.inc();
    ttft.observe(0.7);
    errors.get_or_create(&Labels { code: "timeout" }).inc();
    let text = metrics.clone().encode();
    for line in [
        "# TYPE vllm:prompt_tokens_total counter",
        "vllm:prompt_tokens_total 3",
        "vllm:num_requests_running 1",
        "vllm:time_to_first_token_seconds_bucket{le=\"0.5\"} 0",
        "vllm:time_to_first_token_seconds_bucket{le=\"+Inf\"} 1",
        "vllm:time_to_first_token_seconds_count 1",
        "twinfer_errors_total{code=\"timeout\"} 1",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
    running.dec();
    assert!(metrics.encode().contains("vllm:num_requests_running 0\n"));
    assert!(METRICS_CONTENT_TYPE.contains("0.0.4"));
    for buckets in [
        &SECONDS_TTFT[..],
        &SECONDS_INTER_TOKEN,
        &SECONDS_REQUEST,
        &TOKENS,
    ] {
        assert!(buckets.windows(2).all(|w| w[0] < w[1]));
    }
}
