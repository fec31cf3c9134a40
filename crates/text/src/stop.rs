use crate::TextError;

/// Room for the text of a token; longer ones are taken too.
const PIECE: usize = 256;

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
        let longest = stops.iter().map(String::len).max();
        let stops = stops.iter().map(|s| Automaton::new(s)).collect();
        Ok(Self {
            stops,
            include,
            held: String::with_capacity(longest.unwrap_or(0) + PIECE),
            hit: None,
        })
    }

    /// Takes the next piece, adds the text that may be shown now to `out`, and returns the place in the request's list
    /// of the stop string that was found. After a hit every further piece is dropped.
    pub fn push_into(&mut self, piece: &str, out: &mut String) -> Option<usize> {
        if self.hit.is_some() {
            return self.hit;
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
                out.push_str(&self.held[..keep]);
                self.held.clear();
                return self.hit;
            }
        }
        let hold = self.stops.iter().map(|s| s.state).max().unwrap_or(0);
        let show = self.held.len() - hold;
        out.push_str(&self.held[..show]);
        self.held.drain(..show);
        None
    }

    /// Takes a piece in which no stop string may end or begin (before `min_tokens` is reached), and adds the text to
    /// `out`.
    pub fn pass_into(&mut self, piece: &str, out: &mut String) {
        for stop in &mut self.stops {
            stop.state = 0;
        }
        self.finish_into(out);
        if self.hit.is_none() {
            out.push_str(piece);
        }
    }

    /// Ends the text: adds what was held back and became no stop string to `out`.
    pub fn finish_into(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(stops: &[&str], include: bool) -> StopMatcher {
        let stops: Vec<String> = stops.iter().map(|&s| s.to_owned()).collect();
        StopMatcher::new(&stops, include).unwrap()
    }

    impl StopMatcher {
        fn push(&mut self, piece: &str) -> (String, Option<usize>) {
            let mut text = String::new();
            let hit = self.push_into(piece, &mut text);
            (text, hit)
        }

        fn pass(&mut self, piece: &str) -> String {
            let mut text = String::new();
            self.pass_into(piece, &mut text);
            text
        }

        fn finish(&mut self) -> String {
            let mut text = String::new();
            self.finish_into(&mut text);
            text
        }
    }

    /// The text shown for these pieces, and the hit.
    fn run(matcher: &mut StopMatcher, pieces: &[&str]) -> (String, Option<usize>) {
        let mut text = String::new();
        for piece in pieces {
            let (shown, hit) = matcher.push(piece);
            text += &shown;
            if hit.is_some() {
                return (text, hit);
            }
        }
        (text + &matcher.finish(), None)
    }

    #[test]
    fn stops_are_found_wherever_they_lie() {
        for (stops, pieces, shown, hit) in [
            (&["cde"][..], &["ab", "c", "d", "ef"][..], "ab", Some(0)), // over three tokens
            (&["DE"], &["ABC", "xDEF"], "ABCx", Some(0)),               // inside one
            (&["ab"], &["a", "b"], "", Some(0)),                        // first character
            (&["bcd", "abc"], &["xabcd"], "x", Some(1)), // overlapping: the first to end
            (&["bc", "abc"], &["abc"], "a", Some(0)),    // same end: the first listed
            (&["abc", "bc"], &["abc"], "", Some(0)),
            (&["🚀"], &["go ", "🚀!"], "go ", Some(0)),
            (&["\n\nUser:"], &["a\n\nUs", "ed"], "a\n\nUsed", None), // never completes
            (&["aab"], &["aaab"], "a", Some(0)), // restart inside a partial match
            (&["abcd"], &["ab", "c"], "abc", None), // flushed at the end
            (&[], &["abc"], "abc", None),
        ] {
            assert_eq!(
                run(&mut matcher(stops, false), pieces),
                (shown.to_owned(), hit),
                "{stops:?} {pieces:?}"
            );
        }
    }

    #[test]
    fn an_included_stop_ends_the_text() {
        let mut stop = matcher(&["END"], true);
        assert_eq!(
            run(&mut stop, &["a E", "ND b"]),
            ("a END".to_owned(), Some(0))
        );
        assert_eq!(stop.matched(), Some("END"));
        assert_eq!(stop.push("more"), (String::new(), Some(0)));
        assert_eq!(stop.finish(), "");
    }

    #[test]
    fn text_that_cannot_become_a_stop_is_not_held_back() {
        let mut stop = matcher(&["</answer>"], false);
        assert_eq!(stop.push("hello ").0, "hello ");
        assert_eq!(stop.push("a </ans").0, "a ");
        assert_eq!(stop.push("x").0, "</ansx");
    }

    #[test]
    fn passed_text_neither_matches_nor_begins_a_match() {
        let mut stop = matcher(&["ab"], false);
        assert_eq!(stop.pass("ab a"), "ab a");
        assert_eq!(stop.push("b").0, "b");
        assert_eq!(stop.push("a").0, "");
        assert_eq!(stop.pass("b"), "ab");
        assert_eq!(run(&mut stop, &["ab"]), (String::new(), Some(0)));
    }

    #[test]
    fn empty_stops_are_refused() {
        let stops = ["a".to_owned(), String::new()];
        assert!(matches!(
            StopMatcher::new(&stops, false),
            Err(TextError::EmptyStop { index: 1 })
        ));
    }

    /// All places where a stop ends, searched naively.
    fn naive(text: &str, stops: &[String], include: bool) -> (String, Option<usize>) {
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        let hit = ends
            .flat_map(|end| (0..stops.len()).map(move |i| (end, i)))
            .find(|&(end, i)| text[..end].ends_with(&stops[i]));
        match hit {
            Some((end, i)) => {
                let keep = if include { end } else { end - stops[i].len() };
                (text[..keep].to_owned(), Some(i))
            }
            None => (text.to_owned(), None),
        }
    }

    proptest! {
        #[test]
        fn any_cut_gives_what_a_naive_search_gives(
            pieces in prop::collection::vec("[ab中]{0,5}", 0..12),
            stops in prop::collection::vec("[ab中]{1,4}", 0..4),
            include in any::<bool>(),
        ) {
            let longest = stops.iter().map(|s| s.chars().count()).max().unwrap_or(1);
            let mut matcher = StopMatcher::new(&stops, include).unwrap();
            let (mut shown, mut fed, mut hit) = (String::new(), 0, None);
            for piece in &pieces {
                let (text, found) = matcher.push(piece);
                shown += &text;
                fed += piece.chars().count();
                if found.is_some() {
                    hit = found;
                    break;
                }
                prop_assert!(fed - shown.chars().count() < longest);
            }
            if hit.is_none() {
                shown += &matcher.finish();
            }
            prop_assert_eq!((shown, hit), naive(&pieces.concat(), &stops, include));
        }
    }
}
