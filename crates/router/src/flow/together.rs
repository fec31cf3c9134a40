//! Both legs at the same time, one request's way as a state machine: vLLM's MooncakeConnector, where both begin at once
//! under a transfer id of the router's, and vLLM-Ascend's MooncakeLayerwiseConnector, where decode begins and asks for
//! prefill when it has room. No async, no clock, no sockets.
//!
//! ```text
//! PickPair -> Decode ------------------------> Relay -> over
//!         \-> Prefill (at once, or when asked)
//! ```
//!
//! Decode's first byte ends the matter: it has the KV. Nobody tells a decode instance that prefill failed but the router:
//! its request is dropped, and it aborts it.

use super::pull::Failure;
use crate::policy::Tried;
use crate::registry::InstanceId;

/// When prefill begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begin {
    /// With decode.
    AtOnce,
    /// When decode asks.
    WhenAsked,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Answer to [`Act::PickPair`].
    PickedPair {
        prefill: InstanceId,
        decode: InstanceId,
    },
    /// Answer to [`Act::PickPrefill`].
    PickedPrefill(InstanceId),
    /// Answer to [`Act::PickDecode`].
    PickedDecode(InstanceId),
    /// No instance is left to pick.
    NoneLeft,
    /// Decode has room and wants the prompt's KV.
    Asked,
    PrefillDone,
    PrefillFailed(Failure),
    DecodeStarted,
    DecodeFailed(Failure),
}

/// What to do next, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    PickPair,
    PickPrefill,
    /// Another decode instance for this prefill.
    PickDecode(InstanceId),
    /// Under a new transfer id, if there is one.
    Begin,
    Prefill(InstanceId),
    Decode(InstanceId),
    /// Drop a leg that runs.
    DropPrefill,
    DropDecode,
    /// Answer the question of decode.
    Tell(bool),
    Relay,
    Refuse,
}

/// One request, until it is relayed or refused.
#[derive(Debug)]
pub(crate) struct Together {
    begin: Begin,
    max_attempts: u32,
    state: State,
    tried: Tried,
    prefills: u32,
    decodes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    PickingPair,
    PickingPrefill {
        decode: InstanceId,
    },
    PickingDecode {
        prefill: InstanceId,
        done: bool,
    },
    Running {
        prefill: InstanceId,
        decode: InstanceId,
        leg: PrefillLeg,
    },
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrefillLeg {
    Waits,
    Runs,
    Done,
}

impl Together {
    /// `max_attempts` bounds the tries of each leg.
    pub(crate) fn start(begin: Begin, max_attempts: u32) -> (Self, Act) {
        let flow = Self {
            begin,
            max_attempts,
            state: State::PickingPair,
            tried: Tried::default(),
            prefills: 0,
            decodes: 0,
        };
        (flow, Act::PickPair)
    }

    /// What must not be picked again.
    pub(crate) fn tried(&self) -> &Tried {
        &self.tried
    }

    /// Was any instance asked?
    pub(crate) fn sent_anything(&self) -> bool {
        self.prefills + self.decodes > 0
    }

    /// Takes an event. One that does not fit the state changes nothing: legs that were dropped may still be heard of.
    pub(crate) fn on(&mut self, event: Event) -> Vec<Act> {
        match (self.state, event) {
            (State::PickingPair, Event::PickedPair { prefill, decode }) => {
                self.decodes += 1;
                let at_once = self.begin == Begin::AtOnce;
                self.prefills += u32::from(at_once);
                let leg = match at_once {
                    true => PrefillLeg::Runs,
                    false => PrefillLeg::Waits,
                };
                self.state = State::Running {
                    prefill,
                    decode,
                    leg,
                };
                let mut acts = vec![Act::Begin, Act::Decode(decode)];
                acts.extend(at_once.then_some(Act::Prefill(prefill)));
                acts
            }
            (State::PickingPair, Event::NoneLeft) => self.refuse(&[]),
            (
                State::Running {
                    prefill,
                    decode,
                    leg: PrefillLeg::Waits,
                },
                Event::Asked,
            ) => self.prefill(prefill, decode),
            (State::PickingPrefill { decode }, Event::PickedPrefill(prefill)) => {
                self.prefill(prefill, decode)
            }
            (State::PickingPrefill { .. }, Event::NoneLeft) => {
                self.refuse(&[Act::Tell(false), Act::DropDecode])
            }
            (State::PickingPrefill { decode }, Event::DecodeFailed(failure)) => {
                self.decode_failed(None, decode, failure)
            }
            (State::PickingDecode { prefill, done }, Event::PickedDecode(decode)) => {
                self.decodes += 1;
                let leg = match done {
                    true => PrefillLeg::Done,
                    false => PrefillLeg::Runs,
                };
                self.state = State::Running {
                    prefill,
                    decode,
                    leg,
                };
                vec![Act::Decode(decode)]
            }
            (State::PickingDecode { .. }, Event::NoneLeft) => self.refuse(&[Act::DropPrefill]),
            (
                State::Running {
                    prefill,
                    decode,
                    leg: PrefillLeg::Runs,
                },
                Event::PrefillDone,
            ) => {
                let leg = PrefillLeg::Done;
                self.state = State::Running {
                    prefill,
                    decode,
                    leg,
                };
                match self.begin {
                    Begin::AtOnce => Vec::new(),
                    Begin::WhenAsked => vec![Act::Tell(true)],
                }
            }
            (
                State::Running {
                    prefill,
                    decode,
                    leg: PrefillLeg::Runs,
                },
                Event::PrefillFailed(failure),
            ) => self.prefill_failed(prefill, decode, failure),
            (State::Running { .. }, Event::DecodeStarted) => {
                self.state = State::Over;
                vec![Act::Relay]
            }
            (
                State::Running {
                    prefill,
                    decode,
                    leg,
                },
                Event::DecodeFailed(failure),
            ) => self.decode_failed(Some((prefill, leg)), decode, failure),
            _ => Vec::new(),
        }
    }

    fn prefill(&mut self, prefill: InstanceId, decode: InstanceId) -> Vec<Act> {
        self.prefills += 1;
        let leg = PrefillLeg::Runs;
        self.state = State::Running {
            prefill,
            decode,
            leg,
        };
        vec![Act::Prefill(prefill)]
    }

    fn prefill_failed(
        &mut self,
        prefill: InstanceId,
        decode: InstanceId,
        failure: Failure,
    ) -> Vec<Act> {
        self.tried.prefill.push(prefill);
        let give_up = failure == Failure::Final || self.prefills >= self.max_attempts;
        match (self.begin, give_up) {
            (Begin::AtOnce, true) => self.refuse(&[Act::DropDecode]),
            (Begin::WhenAsked, true) => self.refuse(&[Act::Tell(false), Act::DropDecode]),
            // Decode was told of this prefill instance: it must begin anew too, if it may once more.
            (Begin::AtOnce, false) if self.decodes >= self.max_attempts => {
                self.refuse(&[Act::DropDecode])
            }
            (Begin::AtOnce, false) => {
                self.state = State::PickingPair;
                vec![Act::DropDecode, Act::PickPair]
            }
            // Decode waits for whoever writes.
            (Begin::WhenAsked, false) => {
                self.state = State::PickingPrefill { decode };
                vec![Act::PickPrefill]
            }
        }
    }

    fn decode_failed(
        &mut self,
        prefill: Option<(InstanceId, PrefillLeg)>,
        decode: InstanceId,
        failure: Failure,
    ) -> Vec<Act> {
        self.tried.decode.push(decode);
        if failure == Failure::Final || self.decodes >= self.max_attempts {
            return self.refuse(&[Act::DropPrefill]);
        }
        let untouched = matches!(failure, Failure::Unreachable | Failure::Busy);
        match prefill {
            // Nobody has begun to fetch: what prefill computes is for the next one.
            Some((prefill, leg)) if self.begin == Begin::AtOnce && untouched => {
                self.state = State::PickingDecode {
                    prefill,
                    done: leg == PrefillLeg::Done,
                };
                vec![Act::PickDecode(prefill)]
            }
            // The prompt would be computed once too often.
            _ if self.prefills >= self.max_attempts => self.refuse(&[Act::DropPrefill]),
            _ => {
                self.state = State::PickingPair;
                vec![Act::DropPrefill, Act::PickPair]
            }
        }
    }

    fn refuse(&mut self, before: &[Act]) -> Vec<Act> {
        self.state = State::Over;
        before.iter().copied().chain([Act::Refuse]).collect()
    }
}

#[cfg(test)]
#[path = "together_tests.rs"]
mod tests;
