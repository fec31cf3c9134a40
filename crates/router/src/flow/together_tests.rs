use super::*;
use proptest::prelude::*;

const P1: InstanceId = InstanceId(0);
const P2: InstanceId = InstanceId(1);
const D1: InstanceId = InstanceId(2);
const D2: InstanceId = InstanceId(3);

fn picked(prefill: InstanceId, decode: InstanceId) -> Event {
    Event::PickedPair { prefill, decode }
}

#[test]
fn decode_first_asks_for_prefill_and_is_told() {
    let (mut flow, first) = Together::start(Begin::WhenAsked, 3);
    assert_eq!(first, Act::PickPair);
    assert_eq!(flow.on(picked(P1, D1)), [Act::Begin, Act::Decode(D1)]);
    assert_eq!(flow.on(Event::Asked), [Act::Prefill(P1)]);
    assert_eq!(flow.on(Event::PrefillDone), [Act::Tell(true)]);
    assert_eq!(flow.on(Event::DecodeStarted), [Act::Relay]);
}

#[test]
fn a_prefill_that_fails_is_replaced_while_decode_waits() {
    let (mut flow, _) = Together::start(Begin::WhenAsked, 2);
    flow.on(picked(P1, D1));
    flow.on(Event::Asked);
    assert_eq!(
        flow.on(Event::PrefillFailed(Failure::Broke)),
        [Act::PickPrefill]
    );
    assert_eq!(flow.on(Event::PickedPrefill(P2)), [Act::Prefill(P2)]);
    // Nobody else tells decode: its request is dropped.
    let acts = flow.on(Event::PrefillFailed(Failure::Broke));
    assert_eq!(acts, [Act::Tell(false), Act::DropDecode, Act::Refuse]);
}

#[test]
fn both_at_once_begin_anew_together_when_prefill_fails() {
    let (mut flow, _) = Together::start(Begin::AtOnce, 3);
    let acts = flow.on(picked(P1, D1));
    assert_eq!(acts, [Act::Begin, Act::Decode(D1), Act::Prefill(P1)]);
    let acts = flow.on(Event::PrefillFailed(Failure::Unreachable));
    assert_eq!(acts, [Act::DropDecode, Act::PickPair]);
    assert_eq!(flow.tried().prefill, [P1]);
}

#[test]
fn a_decode_that_never_saw_the_request_costs_no_prefill() {
    let (mut flow, _) = Together::start(Begin::AtOnce, 3);
    flow.on(picked(P1, D1));
    let acts = flow.on(Event::DecodeFailed(Failure::Unreachable));
    assert_eq!(acts, [Act::PickDecode(P1)]);
    assert_eq!(flow.on(Event::PickedDecode(D2)), [Act::Decode(D2)]);
    assert_eq!(flow.on(Event::PrefillDone), []);
    assert_eq!(flow.on(Event::DecodeStarted), [Act::Relay]);
}

#[test]
fn a_decode_that_broke_takes_the_transfer_with_it() {
    let (mut flow, _) = Together::start(Begin::AtOnce, 3);
    flow.on(picked(P1, D1));
    let acts = flow.on(Event::DecodeFailed(Failure::Broke));
    assert_eq!(acts, [Act::DropPrefill, Act::PickPair]);
    assert_eq!(flow.tried().decode, [D1]);
}

proptest! {
    /// Whatever happens in whatever order: at most one leg of each kind runs, legs are dropped before others begin, tries
    /// are bounded, and the request ends in one way.
    #[test]
    fn every_schedule_ends_with_one_answer(
        at_once in any::<bool>(),
        max_attempts in 1u32..4,
        schedule in proptest::collection::vec((0u8..8, any::<proptest::sample::Index>()), 80),
    ) {
        let begin = if at_once { Begin::AtOnce } else { Begin::WhenAsked };
        let (mut flow, first) = Together::start(begin, max_attempts);
        let (mut prefill, mut decode): (Option<InstanceId>, Option<InstanceId>) = (None, None);
        let (mut asked, mut answered, mut prefills, mut decodes) = (false, false, 0, 0);
        let mut open = vec![first];
        let mut ended = None;
        for (what, index) in schedule {
            for act in std::mem::take(&mut open) {
                prop_assert!(ended.is_none());
                match act {
                    Act::PickPair | Act::PickPrefill | Act::PickDecode(_) => open.push(act),
                    Act::Begin => {
                        prop_assert!(prefill.is_none() && decode.is_none());
                        (asked, answered) = (false, false);
                    }
                    Act::Prefill(id) => {
                        prop_assert!(prefill.is_none() && !flow.tried().prefill.contains(&id));
                        prefills += 1;
                        prefill = Some(id);
                    }
                    Act::Decode(id) => {
                        prop_assert!(decode.is_none() && !flow.tried().decode.contains(&id));
                        decodes += 1;
                        decode = Some(id);
                    }
                    Act::DropPrefill => prefill = None,
                    Act::DropDecode => decode = None,
                    Act::Tell(_) => {
                        prop_assert!(asked && !answered, "an answer to no question");
                        answered = true;
                    }
                    Act::Relay | Act::Refuse => {
                        prop_assert!(act == Act::Refuse || decode.is_some());
                        prop_assert!(act == Act::Relay || decode.is_none(), "decode waits for ever");
                        ended = Some(act);
                    }
                }
            }
            if ended.is_some() {
                break;
            }
            let failures = [Failure::Final, Failure::Busy, Failure::Unreachable, Failure::Broke];
            let failure = *index.get(&failures);
            let tried = flow.tried().clone();
            let pick = |from: [InstanceId; 2], not: &[InstanceId]| from.into_iter().find(|id| !not.contains(id));
            let event = match open.pop() {
                Some(Act::PickPair) => match (pick([P1, P2], &tried.prefill), pick([D1, D2], &tried.decode)) {
                    (Some(prefill), Some(decode)) => picked(prefill, decode),
                    _ => Event::NoneLeft,
                },
                Some(Act::PickPrefill) => pick([P1, P2], &tried.prefill).map_or(Event::NoneLeft, Event::PickedPrefill),
                Some(Act::PickDecode(_)) => pick([D1, D2], &tried.decode).map_or(Event::NoneLeft, Event::PickedDecode),
                _ => match what {
                    0 | 1 if !at_once && decode.is_some() && !asked => {
                        asked = true;
                        Event::Asked
                    }
                    2 | 3 if prefill.is_some() => {
                        prefill = None;
                        if what == 2 { Event::PrefillDone } else { Event::PrefillFailed(failure) }
                    }
                    4 if decode.is_some() => {
                        decode = None;
                        Event::DecodeFailed(failure)
                    }
                    5 if decode.is_some() && (at_once || answered) => Event::DecodeStarted,
                    _ => continue,
                },
            };
            open = flow.on(event);
        }
        prop_assert!(prefills <= max_attempts && decodes <= max_attempts);
    }
}
