/// A question and its only right answer, greedy and whole.
pub(super) struct Question {
    pub(super) ask: &'static str,
    pub(super) expect: &'static str,
}

/// What the bundled model answers surely. Its card names the skills that it has to 100 %: capitals,
/// vocabulary, days and the questions on serving; sums are no such skill.
pub(super) const QUESTIONS: &[Question] = &[
    Question {
        ask: "What is the capital of France?",
        expect: "The capital of France is Paris.",
    },
    Question {
        ask: "What is the capital of Japan?",
        expect: "The capital of Japan is Tokyo.",
    },
    Question {
        ask: "What is the opposite of hot?",
        expect: "The opposite of hot is cold.",
    },
    Question {
        ask: "Which day comes after Monday?",
        expect: "Tuesday comes after Monday.",
    },
    Question {
        ask: "What is a handoff?",
        expect: "A handoff moves the KV cache of a prompt from a prefill instance to a decode instance.",
    },
    Question {
        ask: "Why split prefill and decode?",
        expect: "Prefill needs compute and decode needs bandwidth. Apart, neither of them slows the other.",
    },
];
