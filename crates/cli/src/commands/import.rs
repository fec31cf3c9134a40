//! `twinfer import`.

use crate::args::ImportArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use std::fmt::Write as _;
use std::io::Read as _;
use twinfer_deploy::engines::import;

/// Scripts are written by hand; larger ones are a mistake.
const MAX_BYTES: u64 = 4 << 20;

pub(crate) fn run(args: &ImportArgs) -> Outcome {
    let mut scripts = Vec::new();
    for path in &args.scripts {
        let shown = path.display().to_string();
        let mut text = String::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
            .map_err(|error| Failure::new(Code::Config, format!("{shown}: {error}")))?;
        if read as u64 > MAX_BYTES {
            let message = format!("{shown}: a script has at most {MAX_BYTES} bytes");
            return Err(Failure::new(Code::Config, message));
        }
        scripts.push((shown, text));
    }
    let imported = import(&scripts).map_err(|error| Failure::new(Code::Config, error))?;
    output::write(&imported.text)?;
    if imported.not_understood.is_empty() {
        return Ok(());
    }
    let mut message = String::from("lines that are not in the deployment:");
    for one in &imported.not_understood {
        let _ = write!(
            message,
            "\n{}:{}: {}",
            one.file,
            one.line,
            one.text.escape_debug()
        );
    }
    Err(Failure::new(Code::Usage, message))
}
