//! What a request costs an instance.

/// Which share of a request an instance has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    /// The prompt.
    Prefill,
    /// The output.
    Decode,
    /// Both.
    Whole,
}

/// A request as loads count it. What is not known of it (a text has no length in tokens here) is estimated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Work {
    /// Prompt, in tokens.
    pub(crate) prompt: u64,
    /// Bytes of the body, which the public proxies count.
    pub(crate) bytes: u64,
    /// Hashes of the prompt's blocks, each over all before it; empty where no policy looks at them.
    pub(crate) prefix: Vec<u64>,
}

/// Cost of a request of no length: what a step, a connection and a slot cost. Loads are counted in thousandths of it.
pub(super) const REQUEST: u64 = 1000;
/// Prompt tokens whose computation costs as much as a request does beside it.
const PREFILL_TOKENS: u64 = 512;
/// Tokens of KV that keep as much of a decode instance busy as a sequence does.
const KV_TOKENS: u64 = 4096;

/// What an instance has to do for requests that were given to it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) requests: u32,
    /// When it was picked last.
    pub(super) last: u64,
    /// Prompts that are being computed.
    prefill: u64,
    /// Sequences and the KV they hold.
    decode: u64,
    /// Scores of the public proxies, in thousandths: of prompts, of their KV, of outputs.
    proxy_prefill: u64,
    proxy_kv: u64,
    proxy_decode: u64,
}

impl Work {
    fn prefill_cost(&self) -> u64 {
        REQUEST + self.prompt.saturating_mul(REQUEST) / PREFILL_TOKENS
    }

    fn decode_cost(&self) -> u64 {
        REQUEST + self.prompt.saturating_mul(REQUEST) / KV_TOKENS
    }

    /// `bytes / 4 × 0.0345 + 120.0745`, in thousandths.
    fn proxy_prefill(&self) -> u64 {
        self.bytes.saturating_mul(345) / 40 + 120_075
    }

    /// `bytes`, in thousandths.
    fn proxy_decode(&self) -> u64 {
        self.bytes.saturating_mul(1000)
    }
}

impl Load {
    pub(super) fn take(&mut self, side: Side, work: &Work) {
        self.requests += 1;
        if side != Side::Decode {
            self.prefill += work.prefill_cost();
            self.proxy_prefill += work.proxy_prefill();
            self.proxy_kv += work.proxy_prefill();
        }
        if side != Side::Prefill {
            self.decode += work.decode_cost();
            self.proxy_decode += work.proxy_decode();
        }
    }

    pub(super) fn prefilled(&mut self, work: &Work) {
        self.prefill = self.prefill.saturating_sub(work.prefill_cost());
        self.proxy_prefill = self.proxy_prefill.saturating_sub(work.proxy_prefill());
    }

    pub(super) fn give_back(&mut self, side: Side, work: &Work, prefilled: bool) {
        self.requests = self.requests.saturating_sub(1);
        if side != Side::Decode {
            if !prefilled {
                self.prefilled(work);
            }
            self.proxy_kv = self.proxy_kv.saturating_sub(work.proxy_prefill());
        }
        if side != Side::Prefill {
            self.decode = self.decode.saturating_sub(work.decode_cost());
            self.proxy_decode = self.proxy_decode.saturating_sub(work.proxy_decode());
        }
    }

    pub(super) fn cost(&self, side: Side) -> u64 {
        match side {
            Side::Prefill => self.prefill,
            Side::Decode => self.decode,
            Side::Whole => self.prefill + self.decode,
        }
    }

    /// Priority as the public P/D proxies compute it.
    pub(super) fn proxy_score(&self, side: Side) -> u64 {
        let prefill = self.proxy_prefill + self.proxy_kv * 3 / 10;
        match side {
            Side::Prefill => prefill,
            Side::Decode => self.proxy_decode,
            Side::Whole => prefill + self.proxy_decode,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_those_of_the_public_proxies() {
        let work = Work {
            bytes: 4000,
            ..Work::default()
        };
        let mut load = Load::default();
        load.take(Side::Prefill, &work);
        // 4000 / 4 × 0.0345 + 120.0745 = 154.5745, and 0.3 of it.
        let score = load.proxy_score(Side::Prefill);
        assert!((200_940..=200_950).contains(&score), "{score}");
        load.prefilled(&work);
        let kv = load.proxy_score(Side::Prefill);
        assert!((46_370..=46_375).contains(&kv), "{kv}");
        load.give_back(Side::Prefill, &work, true);
        assert_eq!(load.proxy_score(Side::Prefill), 0);
    }

    #[test]
    fn all_of_a_load_comes_back() {
        let work = |n| Work {
            prompt: n,
            bytes: 7 * n,
            ..Work::default()
        };
        let mut load = Load::default();
        for n in 1..100 {
            load.take(Side::Whole, &work(n * 37));
            load.take(Side::Decode, &work(n));
        }
        for n in 1..100 {
            load.give_back(Side::Whole, &work(n * 37), false);
            load.give_back(Side::Decode, &work(n), false);
        }
        assert_eq!(load.cost(Side::Whole) + load.proxy_score(Side::Whole), 0);
        assert_eq!(load.requests, 0);
    }
}
