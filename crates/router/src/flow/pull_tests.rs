use super::*;
use proptest::prelude::*;

const P1: InstanceId = InstanceId(0);
const P2: InstanceId = InstanceId(1);
const D1: InstanceId = InstanceId(2);
const D2: InstanceId = InstanceId(3);

fn picked(prefill: InstanceId, decode: InstanceId) -> Event {
    Event::PickedPair { prefill, decode }
}

fn go(then: Do) -> Step {
    Step {
        release: false,
        then,
    }
}

fn decode(to: InstanceId, with_handle: bool) -> Step {
    go(Do::Decode { to, with_handle })
}

#[test]
fn the_plain_way_sends_each_leg_once() {
    let (mut flow, first) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    assert_eq!(first, go(Do::PickPair));
    assert_eq!(flow.on(picked(P1, D1)), go(Do::Prefill(P1)));
    assert_eq!(
        flow.on(Event::PrefillDone { handle: true }),
        decode(D1, true)
    );
    assert_eq!(flow.on(Event::DecodeStarted), go(Do::Relay));
    assert_eq!(flow.on(Event::StreamEnded), go(Do::Over));
}

#[test]
fn decode_that_fails_before_its_first_byte_does_not_cost_another_prefill() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    flow.on(picked(P1, D1));
    flow.on(Event::PrefillDone { handle: true });
    assert_eq!(
        flow.on(Event::DecodeFailed(Failure::Broke)),
        go(Do::PickDecode { prefill: P1 })
    );
    assert_eq!(flow.tried().decode, vec![D1]);
    assert_eq!(flow.on(Event::PickedOne(D2)), decode(D2, true));
    assert_eq!(flow.on(Event::DecodeStarted), go(Do::Relay));
}

#[test]
fn a_request_that_decode_refuses_releases_prefill() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    flow.on(picked(P1, D1));
    flow.on(Event::PrefillDone { handle: true });
    let step = flow.on(Event::DecodeFailed(Failure::Final));
    assert_eq!(
        step,
        Step {
            release: true,
            then: Do::Refuse
        }
    );
}

#[test]
fn a_lost_handoff_computes_the_prompt_again_elsewhere() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    flow.on(picked(P1, D1));
    flow.on(Event::PrefillDone { handle: true });
    let step = flow.on(Event::DecodeFailed(Failure::HandoffLost));
    assert_eq!(
        step,
        Step {
            release: true,
            then: Do::PickPair
        }
    );
    assert_eq!(flow.tried().pairs, vec![(P1, D1)]);
    assert_eq!(flow.on(picked(P2, D1)), go(Do::Prefill(P2)));
}

#[test]
fn without_handle_decode_gets_none_and_nothing_is_released() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    flow.on(picked(P1, D1));
    assert_eq!(
        flow.on(Event::PrefillDone { handle: false }),
        decode(D1, false)
    );
    assert_eq!(flow.on(Event::ClientGone), go(Do::Over));
}

#[test]
fn one_instance_serves_whole_only_when_no_prefill_has_seen_the_request() {
    for (failure, then) in [
        (Failure::Unreachable, Do::PickWhole),
        (Failure::Broke, Do::Refuse),
    ] {
        let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Decode, 0);
        flow.on(picked(P1, D1));
        assert_eq!(flow.on(Event::PrefillFailed(failure)), go(Do::PickPair));
        assert_eq!(flow.on(Event::NoneLeft), go(then));
    }
}

#[test]
fn an_instance_of_role_both_takes_what_the_pairs_have_no_room_for() {
    for (failure, then) in [
        (Failure::Busy, Do::PickWhole),
        (Failure::Unreachable, Do::PickWhole),
        (Failure::Broke, Do::Refuse),
    ] {
        let (mut flow, _) = PullFlow::start(Way::Pair, 1, Spare::Both, 0);
        flow.on(picked(P1, D1));
        assert_eq!(flow.on(Event::PrefillFailed(failure)), go(then));

        let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Both, 0);
        flow.on(picked(P1, D1));
        flow.on(Event::PrefillDone { handle: true });
        assert_eq!(
            flow.on(Event::DecodeFailed(failure)),
            go(Do::PickDecode { prefill: P1 })
        );
        let step = flow.on(Event::NoneLeft);
        assert_eq!((step.release, step.then), (true, then));
    }
}

#[test]
fn a_stream_that_breaks_off_goes_on_at_another_pair() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 1);
    flow.on(picked(P1, D1));
    flow.on(Event::PrefillDone { handle: true });
    flow.on(Event::DecodeStarted);
    let resume = Resume {
        way: Way::Pair,
        spare: Spare::Nobody,
    };
    assert_eq!(flow.on(Event::StreamBroke(Some(resume))), go(Do::PickPair));
    assert_eq!(flow.tried().decode, vec![D1]);
    assert_eq!(flow.on(picked(P1, D2)), go(Do::Prefill(P1)));
    flow.on(Event::PrefillDone { handle: true });
    assert_eq!(flow.on(Event::DecodeStarted), go(Do::Relay));
    // Once is all that is allowed here.
    assert_eq!(flow.on(Event::StreamBroke(Some(resume))), go(Do::BreakOff));
}

#[test]
fn where_nobody_else_is_left_the_same_instance_may_go_on() {
    let (mut flow, _) = PullFlow::start(Way::Whole, 3, Spare::Nobody, 3);
    flow.on(Event::PickedOne(D1));
    flow.on(Event::DecodeStarted);
    let resume = Resume {
        way: Way::Whole,
        spare: Spare::Nobody,
    };
    assert_eq!(flow.on(Event::StreamBroke(Some(resume))), go(Do::PickWhole));
    assert_eq!(flow.on(Event::NoneLeft), go(Do::PickWhole));
    assert!(flow.tried().decode.is_empty());
    assert_eq!(flow.on(Event::NoneLeft), go(Do::BreakOff));
}

/// Only the second decode instance can serve, and the first has taken the KV with it.
#[test]
fn kv_that_went_with_a_broken_instance_is_computed_again_for_the_other() {
    let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Nobody, 0);
    flow.on(picked(P1, D1));
    flow.on(Event::PrefillDone { handle: true });
    flow.on(Event::DecodeFailed(Failure::Broke));
    assert_eq!(flow.on(Event::PickedOne(D2)), decode(D2, true));
    let step = flow.on(Event::DecodeFailed(Failure::HandoffLost));
    assert_eq!((step.release, step.then), (true, Do::PickPair));
    assert!(flow.tried().pairs.is_empty(), "{:?}", flow.tried());
    assert_eq!(flow.on(picked(P1, D2)), go(Do::Prefill(P1)));
}

#[derive(Clone, Debug)]
enum Happens {
    Good,
    Bare,
    Fails(Failure),
    Gone,
}

fn happens() -> impl Strategy<Value = Happens> {
    let failure = prop_oneof![
        Just(Failure::Final),
        Just(Failure::Busy),
        Just(Failure::Unreachable),
        Just(Failure::Broke),
        Just(Failure::HandoffLost),
    ];
    prop_oneof![
        3 => Just(Happens::Good),
        1 => Just(Happens::Bare),
        4 => failure.prop_map(Happens::Fails),
        1 => Just(Happens::Gone),
    ]
}

proptest! {
    /// Whatever happens in whatever order: each handle is either answered on or released, once; no
    /// instance is asked twice where it failed; tries are bounded; the request ends.
    #[test]
    fn every_schedule_ends_with_nothing_held(
        pair in any::<bool>(),
        spare in prop_oneof![Just(Spare::Nobody), Just(Spare::Decode), Just(Spare::Both)],
        max_attempts in 1u32..5,
        resumes in 0u32..4,
        schedule in proptest::collection::vec((happens(), any::<proptest::sample::Index>()), 200),
    ) {
        let way = if pair { Way::Pair } else { Way::Whole };
        let (mut flow, mut step) = PullFlow::start(way, max_attempts, spare, resumes);
        let prefills: Vec<_> = (0..3).map(InstanceId).collect();
        let decodes: Vec<_> = (3..6).map(InstanceId).collect();
        let mut holding: Option<InstanceId> = None;
        let mut last_prefill = None;
        let (mut sent_prefill, mut sent_decode, mut sent_whole) = (0, 0, 0);
        let mut whole = !pair;
        let mut ended = false;
        let (mut relayed, mut resumed) = (false, 0);
        for (what, index) in schedule {
            if step.release {
                prop_assert!(holding.take().is_some(), "nothing to release");
            }
            let event = match step.then {
                Do::Over | Do::Refuse | Do::BreakOff => {
                    prop_assert!(step.then != Do::Refuse || !relayed, "a client with a part of an answer is refused");
                    prop_assert!(step.then != Do::BreakOff || relayed, "a stream that never began breaks off");
                    ended = true;
                    break;
                }
                _ if matches!(what, Happens::Gone) => Event::ClientGone,
                Do::PickPair => {
                    prop_assert!(holding.is_none());
                    let tried = flow.tried();
                    let open: Vec<_> = prefills.iter().flat_map(|p| decodes.iter().map(move |d| (*p, *d)))
                        .filter(|pair| !tried.pairs.contains(pair) && !tried.prefill.contains(&pair.0) && !tried.decode.contains(&pair.1))
                        .collect();
                    if open.is_empty() { Event::NoneLeft } else {
                        let (prefill, decode) = *index.get(&open);
                        Event::PickedPair { prefill, decode }
                    }
                }
                Do::PickDecode { .. } | Do::PickWhole => {
                    whole |= step.then == Do::PickWhole;
                    let open: Vec<_> = decodes.iter().filter(|d| !flow.tried().decode.contains(d)).collect();
                    if open.is_empty() { Event::NoneLeft } else { Event::PickedOne(**index.get(&open)) }
                }
                Do::Prefill(to) => {
                    sent_prefill += 1;
                    prop_assert!(!flow.tried().prefill.contains(&to));
                    last_prefill = Some(to);
                    match what {
                        Happens::Good => {
                            holding = Some(to);
                            Event::PrefillDone { handle: true }
                        }
                        Happens::Bare => Event::PrefillDone { handle: false },
                        Happens::Fails(Failure::HandoffLost) => Event::PrefillFailed(Failure::Broke),
                        Happens::Fails(failure) => Event::PrefillFailed(failure),
                        Happens::Gone => Event::ClientGone,
                    }
                }
                Do::Decode { to, with_handle } => {
                    *(if whole { &mut sent_whole } else { &mut sent_decode }) += 1;
                    prop_assert!(!flow.tried().decode.contains(&to));
                    prop_assert_eq!(with_handle, holding.is_some());
                    if with_handle {
                        prop_assert_eq!(holding, last_prefill);
                    }
                    match what {
                        Happens::Good | Happens::Bare => {
                            holding = None;
                            Event::DecodeStarted
                        }
                        Happens::Fails(failure) => Event::DecodeFailed(failure),
                        Happens::Gone => Event::ClientGone,
                    }
                }
                Do::Relay => match what {
                    Happens::Fails(failure) => {
                        relayed = true;
                        let resume = (failure != Failure::Final).then_some(Resume { way, spare });
                        resumed += u32::from(resume.is_some());
                        (sent_prefill, sent_decode, sent_whole) = (0, 0, 0);
                        whole = !pair;
                        Event::StreamBroke(resume)
                    }
                    _ => Event::StreamEnded,
                },
            };

            step = flow.on(event);
        }
        prop_assert!(ended, "the request does not end");
        prop_assert!(holding.is_none(), "a handle is left");
        // After a break those that failed are tried once more.
        let most = if resumed > 0 { 2 * max_attempts } else { max_attempts };
        prop_assert!(sent_prefill <= most && sent_decode <= most && sent_whole <= most);
        prop_assert!(resumed <= resumes + 1);
        prop_assert_eq!(flow.on(Event::ClientGone), go(Do::Over));
    }

    /// Events that do not fit never panic and never release twice.
    #[test]
    fn any_events_release_at_most_what_was_held(
        events in proptest::collection::vec(prop_oneof![
            Just(picked(P1, D1)),
            Just(Event::PickedOne(D2)),
            Just(Event::NoneLeft),
            Just(Event::PrefillDone { handle: true }),
            Just(Event::PrefillFailed(Failure::Broke)),
            Just(Event::DecodeStarted),
            Just(Event::DecodeFailed(Failure::HandoffLost)),
            Just(Event::StreamEnded),
            Just(Event::StreamBroke(None)),
            Just(Event::StreamBroke(Some(Resume { way: Way::Pair, spare: Spare::Both }))),
            Just(Event::ClientGone),
        ], 0..40),
    ) {
        let (mut flow, _) = PullFlow::start(Way::Pair, 3, Spare::Both, 2);
        let mut handles = 0;
        let mut released = 0;
        for event in events {
            handles += u32::from(event == Event::PrefillDone { handle: true });
            released += u32::from(flow.on(event).release);
            prop_assert!(released <= handles);
        }
    }
}
