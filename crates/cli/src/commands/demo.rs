//! `twinfer demo`: `up` on the bundled file, a few questions, and what became of them.

mod ask;
mod bundle;
mod metrics;
mod questions;

use super::{plan, runtime, up};
use crate::args::DemoArgs;
use crate::exit::{Code, Failure, Outcome};
use crate::output;
use ask::{Answer, Asker};
use questions::{QUESTIONS, Question};
use std::num::NonZeroU16;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use twinfer_deploy::{
    Deployment, LogStyle, OneOrList, Plan, UpError, UpOptions, random_key, reachable_router_url,
};
use twinfer_protocol::{API_KEY_ENV, DECODE_HEADER, PREFILL_HEADER, Role};

/// The bundled file.
const FILE: &str = include_str!("../../demo/1p1d.yaml");
/// Loading the bundled model takes a second or two; a larger one by `--model` longer.
const READY: Duration = Duration::from_secs(600);

pub(crate) fn run(args: &DemoArgs) -> Outcome {
    crate::logging::start(twinfer_config::LogFormat::Text);
    let bundle = match &args.model {
        Some(_) => None,
        None => Some(bundle::unpack()?),
    };
    let model = match (&args.model, &bundle) {
        (Some(folder), _) => folder.as_path(),
        (None, Some(bundle)) => bundle.folder(),
        (None, None) => Path::new("."),
    };
    let plan = demo_plan(args.port, model)?;
    if args.print_plan {
        return if args.json {
            output::json(&plan)
        } else {
            output::write(&plan)
        };
    }
    runtime::single()?.block_on(show(args, &plan))
}

/// The bundled file with these ports and this model.
fn demo_plan(port: u16, model: &Path) -> Result<Plan, Failure> {
    let mut deployment = Deployment::parse("demo", FILE, Path::new("."))
        .map_err(|wrong| plan::diagnostics(&wrong))?;
    deployment.file.model.path = std::path::absolute(model)
        .map_err(|error| Failure::new(Code::Config, format!("{}: {error}", model.display())))?;
    let nth = |n: u16| port.checked_add(n).and_then(NonZeroU16::new);
    let wrong = || {
        Failure::new(
            Code::Usage,
            format!("--port is {port}; allowed: 1 to 65532"),
        )
    };
    deployment.file.router.port = nth(0).ok_or_else(wrong)?;
    for instance in &mut deployment.file.instances {
        let decode = instance.role == Role::Decode;
        instance.port = Some(OneOrList::One(
            nth(if decode { 3 } else { 1 }).ok_or_else(wrong)?,
        ));
        instance.kv_port = if decode {
            None
        } else {
            Some(OneOrList::One(nth(2).ok_or_else(wrong)?))
        };
    }
    plan::for_this_machine(&deployment).map_err(|wrong| plan::diagnostics(&wrong))
}

async fn show(args: &DemoArgs, plan: &Plan) -> Outcome {
    let signals = runtime::StopSignals::new()?;
    let key = random_key().map_err(Failure::failed)?;
    let options = UpOptions {
        program: up::program()?,
        ready_timeout: READY,
        logs: if args.logs {
            LogStyle::Text
        } else {
            LogStyle::Quiet
        },
        peer_key: Some(key.clone()),
        agent_key: None,
    };
    let (stop, stopped) = watch::channel(0);
    let (ready, is_ready) = oneshot::channel();
    let mut running = pin!(twinfer_deploy::up(plan, &options, stopped, ready));
    let mut counting = pin!(signals.count(&stop));
    let mut questions = pin!(async {
        match is_ready.await {
            Ok(()) => ask_all(plan, &key).await,
            // `up` has failed; it says why.
            Err(_) => std::future::pending().await,
        }
    });
    let mut asked: Option<Outcome> = None;
    let ended = loop {
        tokio::select! {
            ended = &mut running => break ended,
            outcome = &mut questions, if asked.is_none() => {
                if args.once {
                    stop.send_modify(|count| *count += 1);
                } else {
                    if let Err(failure) = &outcome {
                        failure.report();
                    }
                    farewell(plan)?;
                }
                asked = Some(outcome);
            }
            () = &mut counting => {}
        }
    };
    match (asked, ended) {
        (_, Err(error @ UpError::Ports(_))) => Err(Failure::failed(format!(
            "{error}\n--port chooses others; it is {}",
            args.port
        ))),
        (_, Err(error)) => Err(up::failed_with(Code::Failed, &error, args.logs)),
        (Some(outcome), Ok(())) => outcome,
        (None, Ok(())) if args.once => {
            Err(Failure::failed("stopped before all questions were asked"))
        }
        (None, Ok(())) => Ok(()),
    }
}

/// Asks every question in turn; fails with all that was not as it must be.
async fn ask_all(plan: &Plan, key: &str) -> Outcome {
    let mut asker = Asker::new(plan, key)?;
    let mut wrong = Vec::new();
    for question in QUESTIONS {
        output::write(&format_args!("\nQ  {}\nA  ", question.ask))?;
        let answer = match asker.ask(question.ask).await {
            Ok(answer) => answer,
            Err(error) => {
                output::write(&"\n")?;
                wrong.push(format!("{:?}: {error}", question.ask));
                continue;
            }
        };
        output::write(&format_args!("\n   {answer}\n"))?;
        wrong.extend(
            faults(question, &answer, plan)
                .into_iter()
                .map(|fault| format!("{:?}: {fault}", question.ask)),
        );
    }
    if wrong.is_empty() {
        return output::write(&format_args!(
            "\nAll {} answers are right; every prompt but its last token came by handoff.\n",
            QUESTIONS.len()
        ));
    }
    Err(Failure::failed(format!(
        "{} of the demo's checks failed:\n  {}",
        wrong.len(),
        wrong.join("\n  ")
    )))
}

/// What is not as it must be with prefill and decode apart.
fn faults(question: &Question, answer: &Answer, plan: &Plan) -> Vec<String> {
    let mut faults = Vec::new();
    if answer.text.trim() != question.expect {
        faults.push(format!(
            "the answer is {:?}, expected {:?}",
            answer.text, question.expect
        ));
    }
    for (role, by, header) in [
        (Role::Prefill, &answer.prefill, PREFILL_HEADER),
        (Role::Decode, &answer.decode, DECODE_HEADER),
    ] {
        let expected = plan
            .instances
            .iter()
            .filter(|instance| instance.role == role)
            .map(|instance| instance.name.as_str());
        match by {
            None => faults.push(format!("the router's answer has no header {header}")),
            Some(name) if !expected.clone().any(|expected| expected == name) => {
                faults.push(format!(
                    "{header} is {name:?}, expected {}",
                    expected.collect::<Vec<_>>().join(" or ")
                ));
            }
            Some(_) => {}
        }
    }
    let handed = answer.prompt_tokens.saturating_sub(1);
    if answer.handed_tokens != handed {
        faults.push(format!(
            "decode got {} of {} prompt tokens by handoff, expected {handed}",
            answer.handed_tokens, answer.prompt_tokens
        ));
    }
    if answer.computed_tokens != 1 {
        faults.push(format!(
            "decode computed {} prompt tokens, expected 1",
            answer.computed_tokens
        ));
    }
    if answer.handed_bytes == 0 {
        faults.push("no KV bytes were handed over".to_owned());
    }
    faults
}

/// How to go on.
fn farewell(plan: &Plan) -> Outcome {
    let key = match std::env::var_os(API_KEY_ENV) {
        Some(_) => format!(" -H \"authorization: Bearer ${API_KEY_ENV}\""),
        None => String::new(),
    };
    output::write(&format_args!(
        "\nIt serves until Ctrl-C. Ask it yourself:\n\n  curl -sN {}/v1/chat/completions -H 'content-type: \
         application/json'{key} -d '{{\"model\": \"{}\", \"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \
         \"What is the opposite of hot?\"}}]}}'\n\n",
        reachable_router_url(plan),
        plan.served_model_name,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        demo_plan(21800, &model).unwrap_or_else(|failure| panic!("{failure:?}"))
    }

    fn good(question: &Question) -> Answer {
        Answer {
            text: question.expect.to_owned(),
            prefill: Some("prefill".to_owned()),
            decode: Some("decode".to_owned()),
            prompt_tokens: 9,
            output_tokens: 5,
            first_token: Duration::from_millis(3),
            handed_tokens: 8,
            computed_tokens: 1,
            handed_bytes: 4096,
        }
    }

    #[test]
    fn the_port_moves_all_four_ports() {
        let ports: Vec<u16> = plan().ports().iter().map(|port| port.number).collect();
        assert_eq!(ports, [21801, 21802, 21803, 21800]);
    }

    #[test]
    fn a_failed_handoff_is_not_papered_over() {
        let plan = plan();
        let decode = plan
            .instances
            .iter()
            .find(|instance| instance.role == Role::Decode)
            .unwrap();
        let at = decode
            .command
            .iter()
            .position(|word| word == "--kv-load-failure-policy")
            .unwrap();
        assert_eq!(decode.command[at + 1], "fail");
    }

    #[test]
    fn each_way_to_be_wrong_is_a_fault() {
        let (plan, question) = (plan(), &QUESTIONS[0]);
        assert_eq!(
            faults(question, &good(question), &plan),
            Vec::<String>::new()
        );
        type Spoil = fn(&mut Answer);
        let cases: [(&str, Spoil); 8] = [
            ("expected", |answer| answer.text.push('x')),
            ("x-twinfer-prefill", |answer| answer.prefill = None),
            ("x-twinfer-prefill is \"decode\"", |answer| {
                answer.prefill = Some("decode".to_owned())
            }),
            ("x-twinfer-decode", |answer| answer.decode = None),
            ("decode got 7 of 9", |answer| answer.handed_tokens = 7),
            ("decode computed 0", |answer| answer.computed_tokens = 0),
            ("decode computed 9", |answer| answer.computed_tokens = 9),
            ("no KV bytes", |answer| answer.handed_bytes = 0),
        ];
        for (expected, spoil) in cases {
            let mut answer = good(question);
            spoil(&mut answer);
            let found = faults(question, &answer, &plan);
            assert!(
                found.iter().any(|fault| fault.contains(expected)),
                "{expected}: {found:?}"
            );
        }
    }
}
