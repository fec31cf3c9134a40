//! Prefill first (`pull`): one request's way as a state machine. No async, no clock, no sockets: what
//! happened goes in, what to do next comes out.
//!
//! ```text
//! PickPair -> Prefill -> Decode -> Relay -> over
//!     ^          |          |  ^
//!     |  failed  |          |  +- failed before its first byte: another decode, same handle
//!     +----------+----------+---- handoff lost: another pair, prompt computed again
//! ```
//!
//! A stream that breaks off after its first byte goes on at another pair or instance, if what it has given is
//! known (`Resume`): from there on the same states, but the client has an answer already, so what would be
//! refused breaks the stream off, and no failure is the request's fault.
//!
//! A request that one instance serves whole goes `PickWhole -> Decode -> Relay`; one that the pairs have
//! no room for may go on to it.
//!
//! A handle that prefill gave out is released on every way out on which no decode instance has begun
//! to answer. Release is idempotent at the instance, and a fetch that runs is not cut by it.

use crate::policy::Tried;
use crate::registry::InstanceId;

/// How a request is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By a prefill and a decode instance.
    Pair,
    /// By one instance.
    Whole,
}

/// Who may serve a request alone that was meant for a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spare {
    Nobody,
    /// Decode instances, when no prefill instance can be reached.
    Decode,
    /// Instances of role `both`, also when a pair has no room.
    Both,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Answer to [`Do::PickPair`].
    PickedPair {
        prefill: InstanceId,
        decode: InstanceId,
    },
    /// Answer to [`Do::PickDecode`] or [`Do::PickWhole`].
    PickedOne(InstanceId),
    /// No instance is left to pick.
    NoneLeft,
    /// Prefill answered; with a handle or without.
    PrefillDone {
        handle: bool,
    },
    PrefillFailed(Failure),
    /// The first byte of a good answer is there.
    DecodeStarted,
    DecodeFailed(Failure),
    /// The client has the whole answer.
    StreamEnded,
    /// Decode broke off after its first byte; how the stream can go on, if it can.
    StreamBroke(Option<Resume>),
    /// The client has closed its connection.
    ClientGone,
}

/// How a stream that broke off may go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resume {
    pub(crate) way: Way,
    pub(crate) spare: Spare,
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The request is at fault: the answer goes to the client.
    Final,
    /// The instance has no room: another may have.
    Busy,
    /// The instance has not seen the request.
    Unreachable,
    /// The instance failed.
    Broke,
    /// Decode could not get the KV: the handle is of no use any more.
    HandoffLost,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Do {
    PickPair,
    /// Another decode instance that is compatible with this prefill.
    PickDecode {
        prefill: InstanceId,
    },
    PickWhole,
    Prefill(InstanceId),
    Decode {
        to: InstanceId,
        with_handle: bool,
    },
    /// Pass decode's bytes on.
    Relay,
    /// Answer the client with the error that was kept.
    Refuse,
    /// End the client's stream with an error.
    BreakOff,
    /// Nothing: whatever still runs is dropped.
    Over,
}

/// What to do next, and whether the handle is released before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) release: bool,
    pub(crate) then: Do,
}

/// One request.
#[derive(Debug)]
pub(crate) struct PullFlow {
    max_attempts: u32,
    way: Way,
    spare: Spare,
    state: State,
    tried: Tried,
    prefills: u32,
    decodes: u32,
    /// Every instance that failed so far had not seen the request.
    only_unreachable: bool,
    /// Or had no room for it: none has begun with it.
    untouched: bool,
    /// A handle is out that no decode instance has answered on.
    held: bool,
    /// A decode instance that failed may have fetched it.
    fetched: bool,
    /// The client has a part of its answer.
    sent: bool,
    /// Times that the stream may go on elsewhere.
    resumes: u32,
    /// Instances that failed may be tried once more, those of before the break too.
    mercy: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    PickingPair,
    PickingDecode {
        prefill: InstanceId,
    },
    PickingWhole,
    Prefilling {
        prefill: InstanceId,
        decode: InstanceId,
    },
    Decoding {
        prefill: Option<InstanceId>,
        decode: InstanceId,
    },
    Relaying {
        decode: InstanceId,
    },
    Over,
}

impl PullFlow {
    /// `max_attempts` bounds the tries of each leg, and of a single instance after them; `resumes` how often a
    /// stream may go on elsewhere.
    pub(crate) fn start(way: Way, max_attempts: u32, spare: Spare, resumes: u32) -> (Self, Step) {
        let (state, then) = match way {
            Way::Pair => (State::PickingPair, Do::PickPair),
            Way::Whole => (State::PickingWhole, Do::PickWhole),
        };
        let flow = Self {
            max_attempts,
            way,
            spare,
            state,
            tried: Tried::default(),
            prefills: 0,
            decodes: 0,
            only_unreachable: true,
            untouched: true,
            held: false,
            fetched: false,
            sent: false,
            resumes,
            mercy: false,
        };
        (
            flow,
            Step {
                release: false,
                then,
            },
        )
    }

    /// What must not be picked again.
    pub(crate) fn tried(&self) -> &Tried {
        &self.tried
    }

    /// Was any instance asked?
    pub(crate) fn sent_anything(&self) -> bool {
        self.prefills + self.decodes > 0
    }

    /// May the stream go on elsewhere if it breaks off?
    pub(crate) fn may_resume(&self) -> bool {
        self.resumes > 0
    }

    /// Takes an event. One that does not fit the state ends the request with the kept error.
    pub(crate) fn on(&mut self, event: Event) -> Step {
        match (self.state, event) {
            (State::Over, _) => Step {
                release: false,
                then: Do::Over,
            },
            (_, Event::ClientGone) => self.end(Do::Over),
            (State::PickingPair, Event::PickedPair { prefill, decode }) => {
                self.prefills += 1;
                self.go(State::Prefilling { prefill, decode }, Do::Prefill(prefill))
            }
            (State::PickingPair | State::PickingDecode { .. }, Event::NoneLeft) => {
                self.whole_or_refuse()
            }
            (State::PickingWhole, Event::NoneLeft) => self.again_or_refuse(),
            (State::PickingDecode { prefill }, Event::PickedOne(decode)) => {
                self.decode(Some(prefill), decode)
            }
            (State::PickingWhole, Event::PickedOne(decode)) => self.decode(None, decode),
            (State::Prefilling { prefill, decode }, Event::PrefillDone { handle }) => {
                self.held = handle;
                self.fetched = false;
                self.decode(Some(prefill), decode)
            }
            (State::Prefilling { prefill, .. }, Event::PrefillFailed(failure)) => {
                self.prefill_failed(prefill, failure)
            }
            (State::Decoding { decode, .. }, Event::DecodeStarted) => {
                self.held = false;
                self.go(State::Relaying { decode }, Do::Relay)
            }
            (State::Decoding { prefill, decode }, Event::DecodeFailed(failure)) => {
                self.decode_failed(prefill, decode, failure)
            }
            (State::Relaying { .. }, Event::StreamEnded) => self.end(Do::Over),
            (State::Relaying { decode }, Event::StreamBroke(Some(resume))) if self.resumes > 0 => {
                self.resume(decode, resume)
            }
            (State::Relaying { .. }, Event::StreamBroke(_)) => self.end(Do::BreakOff),
            _ => self.end(Do::Refuse),
        }
    }

    /// Begins anew, without the instance that broke off.
    fn resume(&mut self, broken: InstanceId, resume: Resume) -> Step {
        self.resumes -= 1;
        self.sent = true;
        self.mercy = true;
        (self.way, self.spare) = (resume.way, resume.spare);
        (self.only_unreachable, self.untouched) = (true, true);
        self.tried = Tried {
            decode: vec![broken],
            ..Tried::default()
        };
        self.begin(resume.way)
    }

    fn begin(&mut self, way: Way) -> Step {
        (self.prefills, self.decodes) = (0, 0);
        match way {
            Way::Pair => self.go(State::PickingPair, Do::PickPair),
            Way::Whole => self.go(State::PickingWhole, Do::PickWhole),
        }
    }

    /// Nobody is left: those that failed may have failed by their connection only.
    fn again_or_refuse(&mut self) -> Step {
        if !std::mem::take(&mut self.mercy) {
            return self.end(Do::Refuse);
        }
        self.tried = Tried::default();
        let way = self.way;
        let release = std::mem::take(&mut self.held);
        Step {
            release,
            ..self.begin(way)
        }
    }

    /// A request that one instance finds fault with is at fault, unless another has served a part of it.
    fn is_final(&self, failure: Failure) -> bool {
        failure == Failure::Final && !self.sent
    }

    fn prefill_failed(&mut self, prefill: InstanceId, failure: Failure) -> Step {
        if self.is_final(failure) {
            return self.end(Do::Refuse);
        }
        self.note(failure);
        self.tried.prefill.push(prefill);
        if self.prefills < self.max_attempts {
            self.go(State::PickingPair, Do::PickPair)
        } else {
            self.whole_or_refuse()
        }
    }

    fn decode_failed(
        &mut self,
        prefill: Option<InstanceId>,
        decode: InstanceId,
        failure: Failure,
    ) -> Step {
        self.note(failure);
        match (failure, prefill) {
            _ if self.is_final(failure) => self.end(Do::Refuse),
            (Failure::HandoffLost, Some(prefill)) if self.held => {
                // What an instance that failed has fetched is gone for all: that says nothing of this pair.
                if !self.fetched {
                    self.tried.pairs.push((prefill, decode));
                }
                if self.prefills < self.max_attempts && self.decodes < self.max_attempts {
                    self.held = false;
                    self.state = State::PickingPair;
                    Step {
                        release: true,
                        then: Do::PickPair,
                    }
                } else {
                    self.again_or_refuse()
                }
            }
            _ => {
                self.fetched |= failure == Failure::Broke;
                self.tried.decode.push(decode);
                match prefill {
                    Some(_) if self.decodes >= self.max_attempts => self.whole_or_refuse(),
                    Some(prefill) => {
                        self.go(State::PickingDecode { prefill }, Do::PickDecode { prefill })
                    }
                    None if self.decodes >= self.max_attempts => self.again_or_refuse(),
                    None => self.go(State::PickingWhole, Do::PickWhole),
                }
            }
        }
    }

    fn decode(&mut self, prefill: Option<InstanceId>, to: InstanceId) -> Step {
        self.decodes += 1;
        let with_handle = self.held;
        self.go(
            State::Decoding {
                prefill,
                decode: to,
            },
            Do::Decode { to, with_handle },
        )
    }

    fn note(&mut self, failure: Failure) {
        let unreachable = failure == Failure::Unreachable;
        self.only_unreachable &= unreachable;
        self.untouched &= unreachable || failure == Failure::Busy;
    }

    /// The pairs have failed. A request that may have broken an instance is not given to further ones.
    fn whole_or_refuse(&mut self) -> Step {
        let may = match self.spare {
            Spare::Nobody => false,
            Spare::Decode => self.only_unreachable && self.decodes == 0,
            Spare::Both => self.untouched,
        };
        if !may {
            return self.again_or_refuse();
        }
        self.decodes = 0;
        self.state = State::PickingWhole;
        Step {
            release: std::mem::take(&mut self.held),
            then: Do::PickWhole,
        }
    }

    fn go(&mut self, state: State, then: Do) -> Step {
        self.state = state;
        Step {
            release: false,
            then,
        }
    }

    fn end(&mut self, then: Do) -> Step {
        self.state = State::Over;
        let then = match then {
            Do::Refuse if self.sent => Do::BreakOff,
            then => then,
        };
        Step {
            release: std::mem::take(&mut self.held),
            then,
        }
    }
}

#[cfg(test)]
#[path = "pull_tests.rs"]
mod tests;
