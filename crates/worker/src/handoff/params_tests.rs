use super::*;
use proptest::prelude::*;

fn peers() -> PeerList {
    PeerList::new(&[], false).unwrap()
}

fn handle() -> RemoteHandle {
    RemoteHandle {
        name: "prefill-0-a".into(),
        epoch: Epoch(0xabc),
        id: HandleId {
            generation: 5,
            nonce: 77,
        },
        peer: Peer::parse("127.0.0.1:36008").unwrap(),
        tokens: 33,
        blocks: vec![17, 3, 0],
        seal: Seal(9),
        lease: Some(Duration::from_secs(30)),
    }
}

fn read(params: &KvTransferParams) -> Result<RemoteHandle, ApiError> {
    RemoteHandle::from_params(
        params,
        Local {
            peers: &peers(),
            block_size: 16,
        },
    )
}

#[test]
fn the_answer_of_prefill_has_the_fields_of_vllm_ascend_and_ours() {
    let prompt: Vec<u32> = (0..33).collect();
    let json = serde_json::to_value(handle().to_params(16, Some(306), &prompt)).unwrap();
    let expected = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [17, 3, 0],
        "remote_engine_id": "prefill-0-a-0000000000000abc", "remote_request_id": "kv-5-000000000000004d",
        "remote_host": "127.0.0.1", "remote_port": 36008, "remote_pcp_size": 1, "remote_dcp_size": 1,
        "remote_ptp_size": 1, "last_token_id": 306, "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": 3, "remote_block_size": 16, "remote_num_tokens": 33,
        "prompt_token_ids": prompt, "remote_kv_seal": "00000000000000000000000000000009",
        "remote_kv_lease_ms": 30_000,
    });
    assert_eq!(json, expected);
}

#[test]
fn a_handle_comes_back_from_its_params_also_with_nested_blocks_and_foreign_fields() {
    let mut json = serde_json::to_value(handle().to_params(16, None, &[1])).unwrap();
    json["remote_block_ids"] = json!([[17, 3, 0]]);
    json["aborted_request"] = json!([]);
    json["num_computed_tokens"] = json!(32);
    let params: KvTransferParams = serde_json::from_value(json).unwrap();
    assert_eq!(read(&params), Ok(handle()));
}

#[test]
fn every_field_of_the_wrong_shape_is_named() {
    let cases: Vec<(&str, Vec<Value>)> = vec![
        ("do_remote_prefill", vec![json!(false)]),
        (
            "remote_engine_id",
            vec![
                json!(null),
                json!(""),
                json!("p"),
                json!("-0000000000000abc"),
                json!("p-abc"),
                json!(format!("{}-0000000000000abc", "p".repeat(600))),
            ],
        ),
        (
            "remote_kv_lease_ms",
            vec![
                json!(0),
                json!(-1),
                json!("30"),
                json!(1.5),
                json!(86_400_001),
            ],
        ),
        (
            "remote_request_id",
            vec![
                json!(null),
                json!("cmpl-5b0c-0-1a2b3c4d"),
                json!("kv-5-4d"),
                json!(""),
            ],
        ),
        (
            "remote_host",
            vec![
                json!(null),
                json!("169.254.169.254"),
                json!("127.0.0.1:22"),
                json!(""),
            ],
        ),
        ("remote_port", vec![json!(null)]),
        ("remote_block_size", vec![json!(null), json!(0), json!(32)]),
        (
            "remote_num_tokens",
            vec![json!(null), json!(0), json!(32), json!(49), json!(u32::MAX)],
        ),
        (
            "remote_block_ids",
            vec![
                json!(null),
                json!(7),
                json!([]),
                json!([1, 2]),
                json!([[1, 2, 3], [4]]),
                json!([1, 2, -3]),
                json!([1, 2, 4294967296_u64]),
                json!([1, 2, "3"]),
                json!([[[1, 2, 3]]]),
                json!([1, 2, 1]),
            ],
        ),
        (
            "remote_kv_seal",
            vec![json!(null), json!(9), json!("9"), json!("z".repeat(32))],
        ),
        ("remote_ptp_size", vec![json!(8), json!("1")]),
        ("remote_pcp_size", vec![json!(2)]),
        ("remote_dcp_size", vec![json!(0)]),
        ("num_prompt_blocks", vec![json!(4)]),
    ];
    for (name, values) in cases {
        for value in values {
            let mut json = serde_json::to_value(handle().to_params(16, None, &[1])).unwrap();
            json[name] = value.clone();
            let params: KvTransferParams = serde_json::from_value(json).unwrap();
            let error = read(&params).unwrap_err();
            // A number of tokens that does not fit the blocks may be told from either side.
            let param = error.param.clone().unwrap_or_default();
            let named = param == format!("kv_transfer_params.{name}")
                || (name == "remote_num_tokens" && param == "kv_transfer_params.remote_block_ids");
            assert!(named, "{name} = {value}: {error:?}");
            assert!(matches!(error.kind.status(), 400 | 403 | 502), "{error:?}");
        }
    }
}

#[test]
fn a_size_of_2_to_the_32_is_no_size() {
    let mut json = serde_json::to_value(handle().to_params(16, None, &[1])).unwrap();
    json["remote_num_tokens"] = json!(4_294_967_296_u64 + 33);
    assert!(serde_json::from_value::<KvTransferParams>(json).is_err());
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-5_i64..70_000).prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 6, |inner| {
        proptest::collection::vec(inner, 0..6).prop_map(Value::from)
    })
}

proptest! {
    /// Any JSON in any fields ends in a handle to loopback or in an error, never in a panic.
    #[test]
    fn foreign_params_are_judged_without_a_panic(
        changes in proptest::collection::vec((0_usize..14, value()), 0..4),
    ) {
        let names = [
            "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_host",
            "remote_port", "remote_block_ids", "remote_block_size", "remote_num_tokens", "last_token_id",
            "remote_kv_seal", "num_prompt_blocks", "remote_ptp_size", "prompt_token_ids",
        ];
        let mut json = serde_json::to_value(handle().to_params(16, None, &[1])).unwrap();
        for (name, value) in changes {
            json[names[name]] = value;
        }
        if let Ok(params) = serde_json::from_value::<KvTransferParams>(json)
            && let Ok(handle) = read(&params)
        {
            prop_assert!(handle.peer.is_loopback());
            prop_assert_eq!(handle.blocks.len(), (handle.tokens as usize).div_ceil(16));
        }
    }
}
