//! One hash per way to deploy, over the same prompts: contract 1 of the architecture page.

mod cells;
mod divergence;
mod local;
mod served;
mod together;

use anyhow::{Context, Result, bail};
use cells::{Cache, Local, MATRICES, Matrix, Model, TIGHT};
pub(crate) use together::{RankArgs, rank};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Which matrix.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Name of the matrix: `slice`, `engine` or `ranks`.
    #[arg(long)]
    pub(crate) matrix: String,
}

impl Args {
    pub(crate) fn of(matrix: &str) -> Self {
        Self {
            matrix: matrix.to_owned(),
        }
    }
}

/// One prompt with its sampling.
#[derive(Clone)]
struct Task {
    prompt: Vec<u32>,
    temperature: f32,
    seed: u64,
}

/// Tokens with the bits of their log-probabilities.
type Output = Vec<(u32, u32)>;

/// Compares the cells of one model with its first.
struct Judge<'a> {
    matrix: &'a Matrix,
    model: &'a Model,
    /// Of the model in the matrix.
    number: usize,
    tasks: Vec<Task>,
    reference: Option<Vec<Output>>,
    cells: usize,
    differing: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Some(matrix) = MATRICES.iter().find(|matrix| matrix.name == args.matrix) else {
        let names: Vec<&str> = MATRICES.iter().map(|matrix| matrix.name).collect();
        bail!(
            "--matrix is {:?}; there are {}",
            args.matrix,
            names.join(", ")
        );
    };
    let mut differing = Vec::new();
    let mut cells = 0;
    for (number, model) in (matrix.models)().into_iter().enumerate() {
        println!("{}", model.name);
        let mut judge = Judge {
            matrix,
            model: &model,
            number,
            tasks: tasks(matrix, model.ids),
            reference: None,
            cells: 0,
            differing: Vec::new(),
        };
        judge.all()?;
        cells += judge.cells;
        differing.extend(judge.differing);
    }
    if !differing.is_empty() {
        bail!(
            "cells differ from the first of their model: {}",
            differing.join("; ")
        );
    }
    println!(
        "{cells} cells, {} prompts of 1 to {} tokens, {} tokens each with log-probabilities: one hash per model",
        matrix.prompts, matrix.longest, matrix.output
    );
    Ok(())
}

impl Judge<'_> {
    fn all(&mut self) -> Result<()> {
        for cell in self.matrix.local {
            if cell.drafts > 0 && !self.model.drafts {
                continue;
            }
            let (outputs, stats) = local::run(self.matrix, self.model, &self.tasks, cell, None)?;
            let name = cell.name;
            if cell.blocks <= TIGHT && stats.preemptions == 0 {
                bail!("{name}: nothing was preempted");
            }
            if cell.cache == Cache::Hot && stats.prompt_tokens.cached == 0 {
                bail!("{name}: nothing was found in the cache");
            }
            if cell.drafts > 0 && stats.speculation.accepted[0] == 0 {
                bail!("{name}: no draft was accepted");
            }
            self.judge(name, outputs, Some(cell))?;
        }
        for (number, cell) in self.matrix.together.iter().enumerate() {
            if cell.drafts > 0 && !self.model.drafts {
                continue;
            }
            let outputs = together::run(self.matrix, self.model, self.number, &self.tasks, number)
                .with_context(|| cell.name)?;
            self.judge(cell.name, outputs, None)?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        for cell in self.matrix.served {
            if cell.drafts > 0 && !self.model.drafts {
                continue;
            }
            let outputs = runtime
                .block_on(served::run(self.matrix, self.model, &self.tasks, cell))
                .with_context(|| cell.name)?;
            self.judge(cell.name, outputs, None)?;
        }
        Ok(())
    }

    fn judge(&mut self, name: &str, outputs: Vec<Output>, cell: Option<&Local>) -> Result<()> {
        println!("  {:016x}  {name}", hash_of(&outputs));
        self.cells += 1;
        let Some(expected) = &self.reference else {
            self.reference = Some(outputs);
            return Ok(());
        };
        let tasks = &self.tasks;
        let Some(prompt) = (0..tasks.len()).find(|&i| expected[i] != outputs[i]) else {
            return Ok(());
        };
        let token = expected[prompt]
            .iter()
            .zip(&outputs[prompt])
            .take_while(|(a, b)| a == b)
            .count();
        let length = tasks[prompt].prompt.len();
        println!(
            "    differs first in prompt {prompt} ({length} tokens) at position {}",
            length + token
        );
        match cell {
            Some(cell) => println!(
                "    {}",
                divergence::first(self.matrix, self.model, tasks, prompt, expected, cell)?
            ),
            None => {
                println!("    the layer is seen only in cells of one process; compare them above");
            }
        }
        self.differing.push(format!("{}, {name}", self.model.name));
        Ok(())
    }
}

/// Prompts of lengths from 1 up, half greedy, half sampled. Every third begins like the one before it,
/// for the prefix cache.
fn tasks(matrix: &Matrix, ids: u64) -> Vec<Task> {
    let token = |prompt: u64, place: u64| {
        let bytes = [prompt.to_le_bytes(), place.to_le_bytes()].concat();
        (6 + xxh3_64(&bytes) % (ids - 6)) as u32
    };
    (0..matrix.prompts)
        .map(|i| {
            let length = 1 + i * (matrix.longest - 1) / (matrix.prompts - 1);
            let shared = if i % 3 == 2 { length * 2 / 3 } else { 0 };
            let prompt = (0..length)
                .map(|place| token(if place < shared { i - 1 } else { i }, place))
                .collect();
            Task {
                prompt,
                temperature: (i % 2) as f32,
                seed: i,
            }
        })
        .collect()
}

fn hash_of(outputs: &[Output]) -> u64 {
    let mut hash = Xxh3::new();
    for output in outputs {
        hash.update(&(output.len() as u64).to_le_bytes());
        for (token, logprob) in output {
            hash.update(&token.to_le_bytes());
            hash.update(&logprob.to_le_bytes());
        }
    }
    hash.digest()
}
