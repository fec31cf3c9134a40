//! Mistakes of a deployment file, each with its place, all told at once.

use std::fmt;

/// Where something stands in a file; lines and columns count from 1, in characters. Line 0: nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line.
    pub line: u32,
    /// Column.
    pub column: u32,
    /// Length in characters.
    pub width: u32,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Where.
    pub place: Place,
    /// Names the field and the value.
    pub message: String,
    /// What is allowed, or what to do.
    pub help: Option<String>,
    /// The line may hold a secret and is not shown.
    pub secret: bool,
}

/// All mistakes of a file, in the order of their places. Its `Display` shows each as
/// `file:line:column: message`, the source line with the place underlined, and what is allowed.
#[derive(Clone, Debug)]
pub struct Diagnostics {
    file: String,
    lines: Vec<String>,
    list: Vec<Diagnostic>,
}

/// More than this are counted, not shown.
const SHOWN: usize = 50;
/// Longer source lines are cut.
const LINE_CHARS: usize = 160;

impl Diagnostics {
    pub(crate) fn new(file: &str, text: &str, mut list: Vec<Diagnostic>) -> Self {
        list.sort_by_key(|diagnostic| diagnostic.place);
        list.dedup();
        Self {
            file: file.to_owned(),
            lines: text.lines().map(str::to_owned).collect(),
            list,
        }
    }

    /// The mistakes.
    pub fn list(&self) -> &[Diagnostic] {
        &self.list
    }
}

impl std::error::Error for Diagnostics {}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, diagnostic) in self.list.iter().take(SHOWN).enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            self.one(f, diagnostic)?;
        }
        if self.list.len() > SHOWN {
            write!(f, "\n{}: {} more", self.file, self.list.len() - SHOWN)?;
        }
        Ok(())
    }
}

impl Diagnostics {
    fn one(&self, f: &mut fmt::Formatter<'_>, diagnostic: &Diagnostic) -> fmt::Result {
        let Place {
            line,
            column,
            width,
        } = diagnostic.place;
        let source = (line as usize)
            .checked_sub(1)
            .and_then(|index| self.lines.get(index));
        match source {
            None => write!(f, "{}: {}", self.file, diagnostic.message)?,
            Some(source) => {
                writeln!(f, "{}:{line}:{column}: {}", self.file, diagnostic.message)?;
                let margin = line.to_string().len();
                if diagnostic.secret {
                    write!(f, "{line} | (not shown: it may hold a secret)")?;
                } else {
                    let shown: String = source.chars().take(LINE_CHARS).map(printable).collect();
                    let count = shown.chars().count();
                    let start = (column.saturating_sub(1) as usize).min(count);
                    let width = (width as usize).clamp(1, (count - start).max(1));
                    writeln!(f, "{line} | {shown}")?;
                    write!(f, "{:margin$} | {:start$}{}", "", "", "^".repeat(width))?;
                }
            }
        }
        if let Some(help) = &diagnostic.help {
            write!(f, "\n  {help}")?;
        }
        Ok(())
    }
}

/// A file may hold anything; a terminal must not be steered by it.
fn printable(c: char) -> char {
    match c {
        '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(diagnostic: Diagnostic) -> String {
        Diagnostics::new("d.yaml", "a: 1\nport: abc\n", vec![diagnostic]).to_string()
    }

    fn at(line: u32, column: u32, width: u32) -> Diagnostic {
        Diagnostic {
            place: Place {
                line,
                column,
                width,
            },
            message: "port is \"abc\"".to_owned(),
            help: Some("allowed: a number".to_owned()),
            secret: false,
        }
    }

    #[test]
    fn a_mistake_shows_its_line_and_underlines_its_place() {
        assert_eq!(
            show(at(2, 7, 3)),
            "d.yaml:2:7: port is \"abc\"\n2 | port: abc\n  |       ^^^\n  allowed: a number"
        );
    }

    #[test]
    fn places_beyond_the_text_do_not_panic() {
        for (line, column, width) in [
            (0, 0, 0),
            (2, 0, 0),
            (2, 900, 900),
            (9, 1, 1),
            (u32::MAX, u32::MAX, u32::MAX),
        ] {
            assert!(show(at(line, column, width)).contains("port is"));
        }
    }

    #[test]
    fn a_line_with_a_secret_is_not_shown() {
        let text = show(Diagnostic {
            secret: true,
            ..at(2, 7, 3)
        });
        assert!(!text.contains("port: abc"), "{text}");
    }
}
