//! Damaged, short, swapped, stale and foreign KV: each is seen, none is taken for good.

use crate::proxy::{Exchange, Fault, Proxy};
use crate::support::{Decode, Fetch as _, Options, Prefill, prompt, redirect, seed};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::task::JoinSet;
use twinfer_protocol::{ApiError, Epoch, ErrorKind, KvTransferParams};
use twinfer_worker::handoff::FetchReport;

/// Attempts that run at the same time.
const AT_ONCE: usize = 16;
const TOKENS: usize = 9;
const PAYLOAD: usize = TOKENS * 10 * 3;

fn is_typed(error: &ApiError) -> bool {
    matches!(
        error.kind,
        ErrorKind::KvStale | ErrorKind::KvCorrupt | ErrorKind::KvMismatch | ErrorKind::KvTransfer
    )
}

/// Reads one prompt's KV through a proxy that damages what the server says.
/// The proxy comes back too, since what the importer said last may still be on its way.
async fn attempt(
    prefill: &Prefill,
    options: &Options,
    fault: Fault,
) -> (Result<FetchReport, ApiError>, Proxy) {
    let decode = Decode::start(options);
    let prompt = prompt(1, TOKENS);
    let params = prefill.hold_filled(&prompt, &[0, 1, 2]).await;
    let proxy = Proxy::start(prefill.addr(), vec![fault], Vec::new()).await;
    let fetched = decode
        .importer
        .fetch(
            &redirect(&params, proxy.addr),
            &prompt,
            &[5, 6, 7],
            TOKENS as u32,
        )
        .await;
    if fetched.is_ok() {
        assert!(
            decode.memory.holds(&[5, 6, 7], TOKENS, seed(&prompt)),
            "other KV was taken for good"
        );
    } else {
        assert_eq!(
            (
                decode.importer.stats().pulls,
                decode.importer.stats().failures.total()
            ),
            (0, 1)
        );
    }
    decode.is_idle().await;
    decode.shut_down().await;
    (fetched, proxy)
}

/// What the server says in a good transfer, in bytes.
async fn length(prefill: &Prefill, options: &Options) -> usize {
    let (fetched, proxy) = attempt(prefill, options, Fault::None).await;
    fetched.unwrap();
    prefill.freed(1).await;
    proxy.carried.load(Relaxed)
}

/// Every fault of a list ends in a typed error, and the prefill side gets everything back.
async fn all_are_seen(faults: impl FnOnce(usize) -> Vec<Fault>) -> Vec<ApiError> {
    let options = Options::default();
    let prefill = Arc::new(Prefill::start(&options).await);
    prefill
        .memory
        .fill(&[0, 1, 2], TOKENS, seed(&prompt(1, TOKENS)));
    let length = length(&prefill, &options).await;
    let faults = faults(length);
    let count = faults.len();
    let mut faults = faults.into_iter();
    let mut running = JoinSet::new();
    let (mut errors, mut proxies) = (Vec::new(), Vec::new());
    loop {
        while running.len() < AT_ONCE
            && let Some(fault) = faults.next()
        {
            let (prefill, options) = (Arc::clone(&prefill), options.clone());
            running.spawn(async move { (fault.clone(), attempt(&prefill, &options, fault).await) });
        }
        let Some(ended) = running.join_next().await else {
            break;
        };
        let (fault, (fetched, proxy)) = ended.unwrap();
        proxies.push(proxy);
        let error = fetched.expect_err(&format!("{fault:?} was not seen"));
        assert!(is_typed(&error), "{fault:?}: {error}");
        errors.push(error);
    }
    assert_eq!(errors.len(), count);
    prefill.freed(count).await;
    prefill.is_idle().await;
    errors
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_anywhere_is_seen() {
    let errors = all_are_seen(|length| (0..length).map(|at| Fault::Flip(at, 0x80)).collect()).await;
    let corrupt = errors
        .iter()
        .filter(|error| error.kind == ErrorKind::KvCorrupt)
        .count();
    assert!(
        corrupt > PAYLOAD,
        "at least all flips of payload are named so: {corrupt}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_low_bit_anywhere_is_seen() {
    // Lengths become a little longer: what is missing is waited for, but not for ever.
    all_are_seen(|length| (0..length).map(|at| Fault::Flip(at, 1)).collect()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_byte_anywhere_is_seen() {
    all_are_seen(|length| {
        (0..length)
            .step_by(11)
            .chain([length - 1])
            .map(Fault::Drop)
            .collect()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_cut_anywhere_is_seen() {
    let errors = all_are_seen(|length| (0..length).step_by(3).map(Fault::CutAfter).collect()).await;
    assert!(
        errors
            .iter()
            .all(|error| error.kind == ErrorKind::KvTransfer)
    );
}

/// What the importer says is damaged: it fails, or has the right KV; and the prefill side is not left
/// with anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flipped_byte_of_a_question_harms_nobody() {
    let lease = Duration::from_secs(1);
    let options = Options {
        lease,
        blocks: 1200,
        ..Options::default()
    };
    let (prefill, decode) = (
        Arc::new(Prefill::start(&options).await),
        Arc::new(Decode::start(&options)),
    );
    let prompt = prompt(1, TOKENS);
    prefill.memory.fill(&[0, 1, 2], TOKENS, seed(&prompt));
    // Hello, proof, Open, Pull, Done: by the byte, some beyond the end.
    let mut running: JoinSet<bool> = JoinSet::new();
    let mut failed = 0;
    for at in 0..300 {
        if running.len() == AT_ONCE {
            failed += u32::from(!running.join_next().await.unwrap().unwrap());
        }
        let (prefill, decode, prompt) = (Arc::clone(&prefill), Arc::clone(&decode), prompt.clone());
        running.spawn(async move {
            let params = prefill.hold_filled(&prompt, &[0, 1, 2]).await;
            let proxy = Proxy::start(prefill.addr(), Vec::new(), vec![Fault::Flip(at, 0x20)]).await;
            let targets: Vec<u32> = (0..3).map(|n| at as u32 * 3 + n).collect();
            let params = redirect(&params, proxy.addr);
            match decode
                .importer
                .fetch(&params, &prompt, &targets, TOKENS as u32)
                .await
            {
                Ok(_) => {
                    assert!(decode.memory.holds(&targets, TOKENS, seed(&prompt)));
                    true
                }
                Err(error) => {
                    assert!(is_typed(&error), "{at}: {error}");
                    false
                }
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        failed += u32::from(!ended.unwrap());
    }
    assert!(failed > 150, "questions have more bytes than {failed}");
    prefill.freed(300).await;
    prefill.is_idle().await;
}

/// Two requests at once, whose answers lose their way.
async fn swapped(bytes: usize) -> Vec<ApiError> {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    // A release shows how much is said before the first answer: its own frame has 22 bytes.
    let clean = Proxy::start(prefill.addr(), Vec::new(), Vec::new()).await;
    let params = redirect(&prefill.hold(&prompt(3, 1), &[6]).await, clean.addr);
    decode
        .importer
        .release(&decode.importer.check(&params).unwrap())
        .await
        .unwrap();
    let welcomed = clean.carried.load(Relaxed) - 22;
    prefill.freed(1).await;
    let fault = Fault::Swap(welcomed, Exchange::new(bytes));
    let proxy = Proxy::start(prefill.addr(), vec![fault.clone(), fault], Vec::new()).await;
    let (first, second) = (prompt(1, TOKENS), prompt(2, TOKENS));
    let first_params = redirect(&prefill.hold(&first, &[0, 1, 2]).await, proxy.addr);
    let second_params = redirect(&prefill.hold(&second, &[3, 4, 5]).await, proxy.addr);
    let (one, two) = tokio::join!(
        decode
            .importer
            .fetch(&first_params, &first, &[0, 1, 2], TOKENS as u32),
        decode
            .importer
            .fetch(&second_params, &second, &[3, 4, 5], TOKENS as u32),
    );
    prefill.freed(2).await;
    prefill.is_idle().await;
    decode.is_idle().await;
    vec![one.unwrap_err(), two.unwrap_err()]
}

#[tokio::test]
async fn swapped_payloads_of_two_requests_are_seen() {
    for error in swapped(PAYLOAD).await {
        assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
        assert!(
            error.message.contains("block 0 of layer 0 is damaged"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn swapped_checksums_and_payloads_are_seen() {
    for error in swapped(PAYLOAD + 9 * 8).await {
        assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
        assert!(error.message.contains("seal"), "{error}");
    }
}

#[tokio::test]
async fn swapped_answers_are_seen() {
    for error in swapped(usize::MAX).await {
        assert!(is_typed(&error), "{error}");
    }
}

/// A fetch over an undamaged connection; the parameters or the prompt are wrong.
async fn refused(
    change: impl FnOnce(&mut KvTransferParams, &KvTransferParams, &mut Vec<u32>),
) -> ApiError {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let mut prompt_read = prompt(1, TOKENS);
    let mut params = prefill.hold(&prompt_read, &[0, 1, 2]).await;
    let other = prefill.hold(&prompt(2, TOKENS), &[3, 4, 5]).await;
    change(&mut params, &other, &mut prompt_read);
    let error = decode
        .importer
        .fetch(&params, &prompt_read, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(prefill.exporter.stats().pulls, 0);
    decode.is_idle().await;
    error
}

#[tokio::test]
async fn a_handle_for_other_tokens_is_refused() {
    let error = refused(|_, _, prompt| prompt[4] += 1).await;
    assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
    let error = refused(|_, _, prompt| prompt.truncate(8)).await;
    assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
    // The handle of another request, with this one's prompt.
    let error =
        refused(|params, other, _| params.remote_request_id = other.remote_request_id.clone())
            .await;
    assert_eq!(error.kind, ErrorKind::KvCorrupt, "{error}");
}

#[tokio::test]
async fn a_handle_with_parts_of_another_is_refused() {
    let error = refused(|params, other, _| params.other = other.other.clone()).await;
    assert_eq!(
        error.kind,
        ErrorKind::KvCorrupt,
        "the seal is another's: {error}"
    );
    let error =
        refused(|params, other, _| params.remote_block_ids = other.remote_block_ids.clone()).await;
    assert_eq!(
        error.kind,
        ErrorKind::KvCorrupt,
        "the blocks are another's: {error}"
    );
    let error = refused(|params, _, _| params.remote_num_tokens = Some(10)).await;
    assert_eq!(
        error.kind,
        ErrorKind::KvCorrupt,
        "it covers one token less: {error}"
    );
}

#[tokio::test]
async fn a_handle_that_was_never_given_out_is_stale() {
    let error =
        refused(|params, _, _| params.remote_request_id = Some("kv-1-0000000000000001".into()))
            .await;
    assert_eq!(error.kind, ErrorKind::KvStale, "guessed nonce: {error}");
    let error =
        refused(|params, _, _| params.remote_request_id = Some("kv-99-0000000000000001".into()))
            .await;
    assert_eq!(error.kind, ErrorKind::KvStale, "future generation: {error}");
    let epoch = Epoch(0xdead);
    let error =
        refused(|params, _, _| params.remote_engine_id = Some(format!("prefill-0-{epoch}"))).await;
    assert_eq!(error.kind, ErrorKind::KvStale, "other epoch: {error}");
}

#[tokio::test]
async fn a_handle_that_has_ended_is_stale() {
    let options = Options {
        lease: Duration::from_millis(100),
        ..Options::default()
    };
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, TOKENS);
    let released = prefill.hold(&prompt, &[0, 1, 2]).await;
    prefill.release(&released);
    let expired = prefill.hold(&prompt, &[0, 1, 2]).await;
    assert_eq!(prefill.freed(2).await, [0, 1]);
    for (params, word) in [(&released, "released"), (&expired, "expired")] {
        let error = decode
            .importer
            .fetch(params, &prompt, &[5, 6, 7], 8)
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::KvStale);
        assert!(error.message.contains(word), "{error}");
    }
    // A handle is good for one last use.
    let once = prefill.hold(&prompt, &[0, 1, 2]).await;
    decode
        .importer
        .fetch(&once, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap();
    let error = decode
        .importer
        .fetch(&once, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvStale, "replayed: {error}");
    prefill.freed(1).await;
    prefill.is_idle().await;
}

#[tokio::test]
async fn memory_damaged_at_the_prefill_instance_after_sealing_is_seen() {
    let options = Options::default();
    let (prefill, decode) = (Prefill::start(&options).await, Decode::start(&options));
    let prompt = prompt(1, TOKENS);
    let params = prefill.hold(&prompt, &[0, 1, 2]).await;
    prefill.memory.arena.write(1).unwrap().unit_mut(2).unwrap()[39] ^= 1;
    let error = decode
        .importer
        .fetch(&params, &prompt, &[5, 6, 7], 8)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::KvCorrupt);
    assert!(error.message.contains("block 1 of layer 2"), "{error}");
    assert_eq!(decode.importer.stats().failures.corrupt, 1);
}
