//! `twinfer diagnose`.

use crate::args::{DiagnoseArgs, Format};
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use std::io::BufReader;
use twinfer_deploy::{Cause, Diagnosis};

pub(crate) fn run(args: &DiagnoseArgs) -> Outcome {
    let mut diagnosis = Diagnosis::default();
    for path in &args.logs {
        let shown = path.display().to_string();
        std::fs::File::open(path)
            .and_then(|file| diagnosis.read(&shown, BufReader::new(file)))
            .map_err(|error| Failure::new(Code::Config, format!("{shown}: {error}")))?;
    }
    let causes: Vec<Cause> = diagnosis.causes();
    match args.format {
        Format::Table => {
            let text: Vec<String> = causes.iter().map(Cause::to_string).collect();
            output::write(&text.join("\n"))?;
        }
        Format::Json => output::json(&causes)?,
    }
    if causes.is_empty() {
        return Err(Failure::failed("no known failure in these logs"));
    }
    Ok(())
}
