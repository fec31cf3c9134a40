//! A fixed team of threads for short parallel sections.
//!
//! A section is a number of tasks that threads claim one by one; the calling thread takes part. Who runs a task never
//! changes what it computes, so the team is free to be late: a worker that wakes up after the tasks are gone simply
//! goes back to sleep, and the caller waits only for workers that have joined.

use std::any::Any;
use std::cell::UnsafeCell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Isa, KernelError};

/// Longest time a waiting thread may spin before it parks.
const MAX_SPIN: Duration = Duration::from_micros(20);

/// Waking a parked thread takes some ten microseconds; less work than this is done sooner by one.
pub(crate) const SOLO_NANOSECONDS: usize = 20_000;

/// The same for a thread that still spins.
const SOLO_NANOSECONDS_SPINNING: usize = 4_000;

/// Threads that run tasks together. With one thread everything runs inline.
#[derive(Debug)]
pub struct ThreadTeam {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    isa: Isa,
    /// Held while a section runs; a second caller, or a task that opens a section itself, runs inline instead.
    section: Mutex<()>,
}

/// One section at a time passes through the gate: the caller opens it, workers join and leave by counting, the caller
/// closes it and waits for those inside. While threads spin no lock is taken; the mutex is only for parking.
#[derive(Debug)]
struct Shared {
    /// Number of the newest section, whether it is open, and how many workers are inside; see [`Gauge`].
    gauge: AtomicU64,
    /// The open section's job. Written by the caller while the gate is closed and nobody is inside, read by workers
    /// after they joined.
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    /// Workers that wait for `wake`, or are about to.
    parked: AtomicUsize,
    /// Whether the caller waits for `done`, or is about to.
    caller_parked: AtomicBool,
    /// The first panic of a section. Also the lock of both condition variables.
    panic: Mutex<Option<String>>,
    /// Workers wait here for a section or for the end.
    wake: Condvar,
    /// The caller waits here for the workers that joined.
    done: Condvar,
    spin: Duration,
}

// SAFETY: `job` is the only part that is not Sync; the gauge orders its accesses as described there.
unsafe impl Sync for Shared {}

/// A value of the gate's counter.
#[derive(Debug, Clone, Copy)]
struct Gauge(u64);

impl Gauge {
    const OPEN: u64 = 1 << 16;
    const SECTION: u64 = 1 << 17;

    fn section(self) -> u64 {
        self.0 / Self::SECTION
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn inside(self) -> u64 {
        self.0 % Self::OPEN
    }
}

/// Pointers into the stack frame of [`ThreadTeam::run`].
#[derive(Debug, Clone, Copy)]
struct Job {
    body: *const (dyn Fn(usize, usize) + Sync),
    next: *const AtomicUsize,
    tasks: usize,
}

// SAFETY: both pointees are Sync, and `run` does not return before every worker that copied a Job has left it.
unsafe impl Send for Job {}

impl ThreadTeam {
    /// Starts `threads` − 1 workers; the caller of [`ThreadTeam::run`] is the last member.
    ///
    /// With `cpus`, worker i is pinned to `cpus[i mod len]`, i from 1; place 0 is meant for the caller, who pins
    /// itself with `twinfer_sys::pin_thread`. Waiting threads park at once, see [`ThreadTeam::with_spin`].
    ///
    /// # Errors
    /// `InvalidInput` when `threads` is 0 or `cpus` is empty; otherwise what starting or pinning a thread reports.
    pub fn new(threads: usize, cpus: Option<&[usize]>, isa: Isa) -> io::Result<Self> {
        Self::start(threads, cpus, isa, Duration::ZERO)
    }

    /// As [`ThreadTeam::new`], but waiting threads spin for `spin` (at most 20 µs) before they park. Only for cores
    /// that nothing else uses: a spinning thread takes time from others.
    ///
    /// # Errors
    /// As [`ThreadTeam::new`].
    pub fn with_spin(
        threads: usize,
        cpus: Option<&[usize]>,
        isa: Isa,
        spin: Duration,
    ) -> io::Result<Self> {
        Self::start(threads, cpus, isa, spin.min(MAX_SPIN))
    }

    /// A team of the calling thread alone.
    pub fn single(isa: Isa) -> Self {
        Self {
            shared: Arc::new(Shared::new(Duration::ZERO)),
            workers: Vec::new(),
            isa,
            section: Mutex::new(()),
        }
    }

    fn start(threads: usize, cpus: Option<&[usize]>, isa: Isa, spin: Duration) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
        if threads == 0 {
            return Err(invalid("a thread team needs at least one thread"));
        }
        if cpus.is_some_and(<[usize]>::is_empty) {
            return Err(invalid("a thread team needs at least one core"));
        }
        let shared = Arc::new(Shared::new(spin));
        let mut team = Self {
            shared,
            workers: Vec::with_capacity(threads - 1),
            isa,
            section: Mutex::new(()),
        };
        let (report, reports) = std::sync::mpsc::sync_channel(threads);
        for worker in 1..threads {
            let shared = Arc::clone(&team.shared);
            let cpu = cpus.map(|cpus| cpus[worker % cpus.len()]);
            let report = report.clone();
            let handle = std::thread::Builder::new()
                .name(format!("compute-{worker}"))
                .spawn(move || {
                    let pinned = cpu.map_or(Ok(()), |cpu| twinfer_sys::pin_thread(&[cpu]));
                    let usable = pinned.is_ok();
                    // The receiver is gone only if the team is being dropped after another worker failed.
                    let _ = report.send(pinned);
                    drop(report);
                    if usable {
                        shared.work(worker);
                    }
                })?;
            team.workers.push(handle);
        }
        drop(report);
        reports.iter().collect::<io::Result<()>>()?;
        Ok(team)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The instruction set kernels of this team use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether so much work is done sooner together than by the calling thread alone.
    pub fn is_worth(&self, nanoseconds: usize) -> bool {
        let least = if self.shared.spin.is_zero() {
            SOLO_NANOSECONDS
        } else {
            SOLO_NANOSECONDS_SPINNING
        };
        !self.workers.is_empty() && nanoseconds >= least
    }

    /// Runs all tasks on the calling thread.
    pub(crate) fn run_solo(
        &self,
        tasks: usize,
        body: impl Fn(usize) + Sync,
    ) -> Result<(), KernelError> {
        claim(&|task, _| body(task), &AtomicUsize::new(0), tasks, 0).map_err(KernelError::Panicked)
    }

    /// As [`ThreadTeam::run`], but on the calling thread alone when all tasks together take less than it is worth to
    /// wake another thread for.
    pub(crate) fn run_worth(
        &self,
        nanoseconds: usize,
        tasks: usize,
        body: impl Fn(usize, usize) + Sync,
    ) -> Result<(), KernelError> {
        if !self.is_worth(nanoseconds) {
            return claim(&body, &AtomicUsize::new(0), tasks, 0).map_err(KernelError::Panicked);
        }
        self.run(tasks, body)
    }

    /// One section in two phases: `first` runs for every task in `0..firsts`, then `second` for every task in
    /// `0..seconds`; no call of `second` starts before all of `first` have returned.
    ///
    /// # Errors
    /// As [`ThreadTeam::run`]; after a panic of `first`, `second` does not run.
    pub(crate) fn run_two(
        &self,
        firsts: usize,
        seconds: usize,
        first: impl Fn(usize) + Sync,
        second: impl Fn(usize) + Sync,
    ) -> Result<(), KernelError> {
        let gate = Gate::new(firsts);
        // Tasks are claimed in ascending order: whoever waits at the gate waits for tasks that others run already.
        self.run(firsts + seconds, |task, _| {
            if task < firsts {
                let passed = gate.pass();
                first(task);
                passed.whole();
            } else if gate.wait() {
                second(task - firsts);
            }
        })
    }

    /// Calls `body(task, worker)` once for every task in `0..tasks` and returns when all calls have returned. `worker`
    /// is below [`ThreadTeam::threads`] and differs between calls that run at the same time in this section. Tasks
    /// start in ascending order. From inside a task, or while another thread's section runs, everything runs inline
    /// on the calling thread.
    ///
    /// # Errors
    /// [`KernelError::Panicked`] when a call panicked; tasks not yet started are then skipped.
    pub fn run(&self, tasks: usize, body: impl Fn(usize, usize) + Sync) -> Result<(), KernelError> {
        let section = if self.workers.is_empty() || tasks < 2 {
            None
        } else {
            self.section.try_lock().ok()
        };
        let next = AtomicUsize::new(0);
        let Some(_section) = section else {
            return claim(&body, &next, tasks, 0).map_err(KernelError::Panicked);
        };

        let erased: &(dyn Fn(usize, usize) + Sync) = &body;
        // SAFETY: only the lifetime changes. The pointer is used by workers between joining and leaving the section,
        // and `close` below returns only when none is inside and none can join any more.
        let erased: *const (dyn Fn(usize, usize) + Sync) = unsafe {
            std::mem::transmute::<
                &(dyn Fn(usize, usize) + Sync),
                &'static (dyn Fn(usize, usize) + Sync),
            >(erased)
        };
        self.shared.open(
            Job {
                body: erased,
                next: &raw const next,
                tasks,
            },
            self.workers.len(),
        );
        let mine = claim(&body, &next, tasks, 0);
        let theirs = self.shared.close();
        mine.and(theirs).map_err(KernelError::Panicked)
    }
}

/// Counts tasks of a first phase.
#[derive(Debug)]
struct Gate {
    tasks: usize,
    done: AtomicUsize,
    broken: AtomicBool,
}

/// A task of the first phase; dropped before [`Pass::whole`] it breaks the gate.
struct Pass<'a>(&'a Gate);

impl Gate {
    fn new(tasks: usize) -> Self {
        Self {
            tasks,
            done: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
        }
    }

    fn pass(&self) -> Pass<'_> {
        Pass(self)
    }

    /// Waits for the first phase; false when a task of it panicked.
    fn wait(&self) -> bool {
        let mut begin = None;
        while self.done.load(Ordering::Acquire) < self.tasks {
            if self.broken.load(Ordering::Relaxed) {
                return false;
            }
            if begin.get_or_insert_with(Instant::now).elapsed() < MAX_SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        true
    }
}

impl Pass<'_> {
    fn whole(self) {
        self.0.done.fetch_add(1, Ordering::Release);
        std::mem::forget(self);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.broken.store(true, Ordering::Relaxed);
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panic was reported by the section it happened in.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn new(spin: Duration) -> Self {
        Self {
            gauge: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            parked: AtomicUsize::new(0),
            caller_parked: AtomicBool::new(false),
            panic: Mutex::new(None),
            wake: Condvar::new(),
            done: Condvar::new(),
            spin,
        }
    }

    /// No code that can panic runs under the lock, so a poisoned state is a whole state.
    fn lock(&self) -> MutexGuard<'_, Option<String>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gauge(&self) -> Gauge {
        Gauge(self.gauge.load(Ordering::SeqCst))
    }

    /// Begins the next section; only one caller at a time, and none while a section is open.
    fn open(&self, job: Job, workers: usize) {
        // SAFETY: the gate is closed and everybody has left, so no worker reads the job.
        unsafe { *self.job.get() = Some(job) };
        self.gauge
            .fetch_add(Gauge::SECTION + Gauge::OPEN, Ordering::SeqCst);
        // A worker counts itself as parked before it looks at the gauge a last time: one of both sees the other.
        if self.parked.load(Ordering::SeqCst) > 0 {
            // Whoever looked before the section began waits by the time the lock is free.
            drop(self.lock());
            // The caller takes a task itself, so a section of n tasks needs n − 1 workers at most.
            if job.tasks > workers {
                self.wake.notify_all();
            } else {
                (1..job.tasks).for_each(|_| self.wake.notify_one());
            }
        }
    }

    /// Lets no more workers in, waits for those inside, and returns the first panic.
    fn close(&self) -> Result<(), String> {
        let before = Gauge(self.gauge.fetch_sub(Gauge::OPEN, Ordering::SeqCst));
        if before.inside() > 0 && !spin_until(self.spin, || self.gauge().inside() == 0) {
            let mut state = self.lock();
            self.caller_parked.store(true, Ordering::SeqCst);
            while self.gauge().inside() > 0 {
                state = self
                    .done
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            self.caller_parked.store(false, Ordering::SeqCst);
        }
        self.lock().take().map_or(Ok(()), Err)
    }

    /// The life of a worker.
    fn work(&self, worker: usize) {
        let mut seen = 0;
        while self.join(&mut seen) {
            // SAFETY: this worker is counted as inside, so the caller neither writes the job nor leaves `run`, which
            // keeps both pointees alive, until `leave` has been counted.
            let outcome = unsafe {
                (*self.job.get()).map_or(Ok(()), |job| {
                    claim(&*job.body, &*job.next, job.tasks, worker)
                })
            };
            self.leave(outcome);
        }
    }

    /// Waits for a section not yet seen and joins it; false when the team ends.
    fn join(&self, seen: &mut u64) -> bool {
        loop {
            let new = || self.gauge().section() != *seen || self.stop.load(Ordering::SeqCst);
            if !new() && !spin_until(self.spin, new) {
                let mut state = self.lock();
                self.parked.fetch_add(1, Ordering::SeqCst);
                while !new() {
                    state = self
                        .wake
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                self.parked.fetch_sub(1, Ordering::SeqCst);
            }
            if self.stop.load(Ordering::SeqCst) {
                return false;
            }
            let gauge = self.gauge();
            if !gauge.is_open() {
                *seen = gauge.section();
            } else if self
                .gauge
                .compare_exchange(gauge.0, gauge.0 + 1, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                *seen = gauge.section();
                return true;
            }
        }
    }

    fn leave(&self, outcome: Result<(), String>) {
        if let Err(message) = outcome {
            self.lock().get_or_insert(message);
        }
        let before = Gauge(self.gauge.fetch_sub(1, Ordering::SeqCst));
        if before.inside() == 1 && self.caller_parked.load(Ordering::SeqCst) {
            drop(self.lock());
            self.done.notify_one();
        }
    }
}

/// Whether `condition` came true within `limit`; a limit of zero asks once.
fn spin_until(limit: Duration, condition: impl Fn() -> bool) -> bool {
    if limit.is_zero() {
        return condition();
    }
    let begin = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if begin.elapsed() >= limit {
            return false;
        }
        for _ in 0..8 {
            std::hint::spin_loop();
        }
    }
}

/// Runs tasks until none is left; a panic takes the remaining ones from everybody.
fn claim(
    body: &(impl Fn(usize, usize) + Sync + ?Sized),
    next: &AtomicUsize,
    tasks: usize,
    worker: usize,
) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| {
        loop {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                return;
            }
            body(task, worker);
        }
    }))
    .map_err(|payload| {
        next.store(tasks, Ordering::Relaxed);
        panic_message(&*payload)
    })
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn team(threads: usize) -> ThreadTeam {
        ThreadTeam::new(threads, None, Isa::available()[0]).unwrap()
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in 1..=4 {
            let team = team(threads);
            for tasks in [0, 1, 2, 3, 7, 100, 1000] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                team.run(tasks, |task, worker| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1),
                    "{threads} {tasks}"
                );
            }
        }
    }

    #[test]
    fn many_short_sections_lose_nothing() {
        for spin in [Duration::ZERO, Duration::from_micros(20)] {
            let team = ThreadTeam::with_spin(3, None, Isa::available()[0], spin).unwrap();
            let sum = AtomicUsize::new(0);
            for _ in 0..3000 {
                team.run(4, |task, _| {
                    sum.fetch_add(task, Ordering::Relaxed);
                })
                .unwrap();
            }
            assert_eq!(sum.into_inner(), 3000 * 6);
        }
    }

    #[test]
    fn two_calls_at_a_time_never_share_a_worker_number() {
        let team = team(4);
        let inside: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
        team.run(2000, |_, worker| {
            assert_eq!(inside[worker].fetch_add(1, Ordering::SeqCst), 0);
            std::hint::black_box((0..50).sum::<usize>());
            inside[worker].fetch_sub(1, Ordering::SeqCst);
        })
        .unwrap();
    }

    #[test]
    fn a_panic_is_an_error_and_the_team_goes_on() {
        for threads in 1..=3 {
            let team = team(threads);
            for bad in [0, 5, 99] {
                let error = team
                    .run(100, |task, _| assert!(task != bad, "task {bad} broke"))
                    .unwrap_err();
                assert_eq!(error, KernelError::Panicked(format!("task {bad} broke")));
                team.run(100, |_, _| {}).unwrap();
            }
        }
    }

    #[test]
    fn the_second_phase_sees_all_of_the_first() {
        for threads in 1..=3 {
            let team = team(threads);
            for _ in 0..300 {
                let done = AtomicUsize::new(0);
                let checked = AtomicUsize::new(0);
                team.run_two(
                    7,
                    5,
                    |_| {
                        done.fetch_add(1, Ordering::Relaxed);
                    },
                    |_| {
                        assert_eq!(done.load(Ordering::Relaxed), 7);
                        checked.fetch_add(1, Ordering::Relaxed);
                    },
                )
                .unwrap();
                assert_eq!(checked.into_inner(), 5);
            }
            let error = team
                .run_two(4, 4, |task| assert!(task != 1, "broke"), |_| {})
                .unwrap_err();
            assert_eq!(error, KernelError::Panicked("broke".to_owned()));
        }
    }

    #[test]
    fn a_section_inside_a_task_runs_inline() {
        let team = team(2);
        let sum = AtomicUsize::new(0);
        team.run(8, |_, _| {
            team.run(8, |task, worker| {
                assert_eq!(worker, 0);
                sum.fetch_add(task, Ordering::Relaxed);
            })
            .unwrap();
        })
        .unwrap();
        assert_eq!(sum.into_inner(), 8 * 28);
    }

    #[test]
    fn callers_on_several_threads_all_finish() {
        let team = team(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(5, |task, _| {
                            sum.fetch_add(task, Ordering::Relaxed);
                        })
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 200 * 10);
    }

    #[test]
    fn impossible_teams_are_refused() {
        let isa = Isa::available()[0];
        for (threads, cpus) in [
            (0, None),
            (2, Some(&[][..])),
            (2, Some(&[0, usize::MAX][..])),
        ] {
            assert_eq!(
                ThreadTeam::new(threads, cpus, isa).unwrap_err().kind(),
                io::ErrorKind::InvalidInput
            );
        }
    }
}
