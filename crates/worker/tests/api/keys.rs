use crate::support::{Options, Server};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tokio::net::TcpListener;

const ROUTES: [(&str, bool); 7] = [
    ("/v1/completions", true),
    ("/v1/chat/completions", true),
    ("/tokenize", true),
    ("/detokenize", true),
    ("/v1/models", false),
    ("/twinfer/instance", false),
    ("/twinfer/load", false),
];

fn key_file(key: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(key.as_bytes()).unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    file
}

/// C9.1.
#[tokio::test]
async fn with_keys_every_route_but_health_wants_one() {
    let (api, peer) = (key_file("client-key"), key_file("peer-key"));
    let server = Server::with(|config| {
        config.api_key_file = Some(api.path().into());
        config.peer_key_file = Some(peer.path().into());
    })
    .await;
    let body = json!({"prompt": "say:x|", "tokens": [97], "messages": [{"role": "user", "content": "say:x|"}]});
    let status = async |key: Option<&str>, path: &str, post: bool| {
        let client = match key {
            Some(key) => server.client.clone().key(key),
            None => server.client.clone(),
        };
        match post {
            true => client.post(path, &body).await,
            false => client.get(path).await,
        }
    };
    for (path, post) in ROUTES {
        for key in [None, Some("wrong"), Some("client-ke"), Some("client-key2")] {
            let answer = status(key, path, post).await;
            assert_eq!(
                (answer.error().0, answer.error().1.as_str()),
                (401, "invalid_api_key"),
                "{path}"
            );
            assert!(!answer.text().contains("client-key"));
        }
        let answer = status(None, &format!("{path}?key=client-key"), post).await;
        assert_eq!(answer.status, 401, "{path}");
        assert_eq!(
            status(Some("peer-key"), path, post).await.status,
            200,
            "{path}"
        );
        let peer_only = path.starts_with("/twinfer");
        let expected = if peer_only { 401 } else { 200 };
        assert_eq!(
            status(Some("client-key"), path, post).await.status,
            expected,
            "{path}"
        );
    }
    assert_eq!(
        status(Some("client-key"), "/twinfer/kv/release", true)
            .await
            .status,
        401
    );
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(server.client.get(path).await.status, 200);
    }
}

/// C9.3.
#[tokio::test]
async fn kv_transfer_params_of_strangers_are_refused_and_dial_nobody() {
    let peer = key_file("peer-key");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = Server::with(|config| config.peer_key_file = Some(peer.path().into())).await;
    let params = |host: &str, port: u16| {
        json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "p-0123456789abcdef",
            "remote_request_id": "kv-1-0123456789abcdef", "remote_block_ids": [0], "remote_host": host, "remote_port": port,
            "remote_block_size": 4, "remote_num_tokens": 2,
            "remote_kv_seal": "0123456789abcdef0123456789abcdef"})
    };
    let body =
        |params: Value| json!({"prompt": "ab", "max_tokens": 2, "kv_transfer_params": params});
    for params in [
        params("127.0.0.1", port),
        params("169.254.169.254", 80),
        params("127.0.0.1", 22),
        json!({"do_remote_decode": true}),
        json!({}),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let mut body = body(params.clone());
            body["messages"] = json!([{"role": "user", "content": "x"}]);
            let (status, code, param, _) = server.client.post(path, &body).await.error();
            assert_eq!(
                (status, code.as_str()),
                (403, "kv_transfer_params_forbidden")
            );
            assert_eq!(param.as_deref(), Some("kv_transfer_params"));
        }
    }
    // A peer that holds the key may still not send us anywhere.
    let trusted = server.client.clone().key("peer-key");
    for host in ["169.254.169.254", "192.0.2.1", "example.org", "0.0.0.0"] {
        let (status, code, ..) = trusted
            .post("/v1/completions", &body(params(host, port)))
            .await
            .error();
        assert_eq!(
            (status, code.as_str()),
            (403, "kv_transfer_params_forbidden"),
            "{host}"
        );
    }
    let dialled = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
    assert!(dialled.is_err(), "somebody connected");
    assert_eq!(server.client.text("say:fine|", 9).await, "fine");
}

/// An instance that does both roles and listens everywhere needs no address for a handoff that nobody
/// asked for; one that only does prefill does.
#[tokio::test]
async fn a_wildcard_host_needs_an_address_only_where_kv_is_handed_over() {
    let peer = key_file("peer-key");
    let server = Server::with(|config| {
        config.host = "0.0.0.0".into();
        config.peer_key_file = Some(peer.path().into());
    })
    .await;
    let kv_addr = server.ready.card.kv_addr.clone().unwrap();
    assert!(kv_addr.starts_with("127.0.0.1:"), "{kv_addr}");
    let mut options = Options::default();
    options.config.host = "0.0.0.0".into();
    options.config.role = twinfer_protocol::Role::Prefill;
    options.config.peer_key_file = Some(peer.path().into());
    let hooks = twinfer_worker::Hooks {
        signals: false,
        ..Default::default()
    };
    let drain = twinfer_http::Drain::new();
    let error = twinfer_worker::serve(options.config, drain, hooks)
        .await
        .unwrap_err();
    assert_eq!(error.exit_class(), twinfer_worker::ExitClass::Config);
    assert!(error.to_string().contains("kv-advertise-host"), "{error}");
}

#[tokio::test]
async fn a_key_file_that_others_may_read_is_refused() {
    let file = key_file("secret-text");
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let mut options = Options::default();
    options.config.api_key_file = Some(file.path().into());
    let hooks = twinfer_worker::Hooks {
        signals: false,
        ..Default::default()
    };
    let drain = twinfer_http::Drain::new();
    let error = twinfer_worker::serve(options.config, drain, hooks)
        .await
        .unwrap_err();
    assert_eq!(error.exit_class(), twinfer_worker::ExitClass::Config);
    assert!(
        error.to_string().contains("0644") && !error.to_string().contains("secret-text"),
        "{error}"
    );
}
