use crate::TextError;

/// Looks for stop strings in a stream of text.
///
/// The match that ends first wins; of matches that end at the same place, the one listed first. Text
/// that may still become a stop string is held back: at most the longest stop string less one
/// character, and only while it is a beginning of one. Time is linear in the text, whatever the pieces
/// (Knuth-Morris-Pratt, one automaton per stop string).
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    include: bool,
    held: String,
    hit: Option<usize>,
}

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that may be shown now.
    pub text: String,
    /// Place in the request's list of the stop string that was found; nothing follows then.
    pub hit: Option<usize>,
}

#[derive(Clone, Debug)]
struct Automaton {
    stop: String,
    /// `fail[i]`: length of the longest proper prefix of the stop that ends its first `i + 1` bytes.
    fail: Vec<usize>,
    /// Bytes of the stop that the text ends with.
    state: usize,
}

impl StopMatcher {
    /// A matcher for these strings; `include` keeps the stop string in the text.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`].
    pub fn new(stops: &[String], include: bool) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        let stops = stops.iter().map(|s| Automaton::new(s)).collect();
        Ok(Self {
            stops,
            include,
            held: String::new(),
            hit: None,
        })
    }

    /// Takes the next piece. After a hit every further piece is dropped.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.hit.is_some() {
            return StopStep {
                text: String::new(),
                hit: self.hit,
            };
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (offset, byte) in piece.bytes().enumerate() {
            let mut found = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.step(byte) && found.is_none() {
                    found = Some((index, stop.stop.len()));
                }
            }
            if let Some((index, len)) = found {
                let end = before + offset + 1;
                let keep = if self.include { end } else { end - len };
                self.hit = Some(index);
                self.held.truncate(keep);
                return StopStep {
                    text: std::mem::take(&mut self.held),
                    hit: self.hit,
                };
            }
        }
        let hold = self.stops.iter().map(|s| s.state).max().unwrap_or(0);
        let tail = self.held.split_off(self.held.len() - hold);
        StopStep {
            text: std::mem::replace(&mut self.held, tail),
            hit: None,
        }
    }

    /// Takes a piece in which no stop string may end or begin (before `min_tokens` is reached).
    pub fn pass(&mut self, piece: &str) -> String {
        for stop in &mut self.stops {
            stop.state = 0;
        }
        let mut text = std::mem::take(&mut self.held);
        if self.hit.is_none() {
            text.push_str(piece);
        }
        text
    }

    /// Ends the text: what was held back and became no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that was found.
    pub fn matched(&self) -> Option<&str> {
        self.hit
            .and_then(|i| self.stops.get(i))
            .map(|s| s.stop.as_str())
    }
}

impl Automaton {
    fn new(stop: &str) -> Self {
        let bytes = stop.as_bytes();
        let mut fail = vec![0; bytes.len()];
        let mut k = 0;
        for i in 1..bytes.len() {
            while k > 0 && bytes[k] != bytes[i] {
                k = fail[k - 1];
            }
            if bytes[k] == bytes[i] {
                k += 1;
            }
            fail[i] = k;
        }
        Self {
            stop: stop.to_owned(),
            fail,
            state: 0,
        }
    }

    /// Does the text end with the stop string after this byte?
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.stop.as_bytes();
        while self.state > 0 && bytes[self.state] != byte {
            self.state = self.fail[self.state - 1];
        }
        if bytes[self.state] == byte {
            self.state += 1;
        }
        if self.state == bytes.len() {
            self.state = self.fail[self.state - 1];
            return true;
        }
        false
    }
}
