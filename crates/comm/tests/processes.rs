//! Groups of real processes: joining, dying, stopping, and networks that are cut.
//!
//! A rank is this program again, which has its own `main` for that.
#![expect(clippy::unwrap_used, reason = "a failed test ends here")]

use libtest_mimic::{Arguments, Trial};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use twinfer_comm::{
    At, Collective, Identity, JoinPlan, Op, Options, Parts, PeerKey, Topology, join, start_up_test,
};
use twinfer_protocol::{Epoch, Fingerprint};
use twinfer_sys::{PidFd, set_parent_death_signal};

const VARIABLE: &str = "TWINFER_COMM_TEST_RANK";
/// Longest time a whole test may take.
const LONG: Duration = Duration::from_secs(60);

fn main() {
    if let Ok(orders) = std::env::var(VARIABLE) {
        return be_rank(&orders);
    }
    let tests: &[(&str, fn())] = &[
        (
            "a_killed_rank_is_named_at_once_by_all",
            a_killed_rank_is_named_at_once_by_all,
        ),
        (
            "a_stopped_rank_is_named_when_its_time_is_over",
            a_stopped_rank_is_named_when_its_time_is_over,
        ),
        (
            "a_cut_connection_ends_the_group_on_both_sides",
            a_cut_connection_ends_the_group_on_both_sides,
        ),
        (
            "ranks_that_do_not_belong_together_are_told_why",
            ranks_that_do_not_belong_together_are_told_why,
        ),
        (
            "missing_and_double_ranks_are_named_to_all_who_came",
            missing_and_double_ranks_are_named_to_all_who_came,
        ),
        (
            "strangers_at_the_rendezvous_do_no_harm",
            strangers_at_the_rendezvous_do_no_harm,
        ),
        (
            "a_port_where_something_else_answers_is_named",
            a_port_where_something_else_answers_is_named,
        ),
        (
            "nothing_is_left_of_a_group_in_the_file_system",
            nothing_is_left_of_a_group_in_the_file_system,
        ),
    ];
    let trial = |&(name, test): &(&'static str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit();
}

/// What a rank of a test is told.
#[derive(Clone)]
struct Orders {
    rank: u32,
    counts: Vec<u32>,
    shares: bool,
    port: u16,
    instance: String,
    version: String,
    key: String,
    limit_ms: u64,
    patience_ms: u64,
    /// Own port, where a proxy stands before it.
    listen: u16,
    advertise: u16,
}

impl Orders {
    fn new(counts: &[u32], shares: bool, port: u16) -> Self {
        Self {
            rank: 0,
            counts: counts.to_vec(),
            shares,
            port,
            instance: "deep".to_owned(),
            version: "1".to_owned(),
            key: "peer key".to_owned(),
            limit_ms: 20_000,
            patience_ms: 20_000,
            listen: 0,
            advertise: 0,
        }
    }

    fn of(&self, rank: u32) -> Self {
        Self {
            rank,
            ..self.clone()
        }
    }

    fn world(&self) -> u32 {
        self.counts.iter().sum()
    }

    fn encode(&self) -> String {
        let counts: Vec<String> = self.counts.iter().map(u32::to_string).collect();
        let parent = std::process::id();
        [
            self.rank.to_string(),
            counts.join(","),
            self.shares.to_string(),
            self.port.to_string(),
            self.instance.clone(),
            self.version.clone(),
            self.key.clone(),
            self.limit_ms.to_string(),
            self.patience_ms.to_string(),
            self.listen.to_string(),
            self.advertise.to_string(),
            parent.to_string(),
        ]
        .join("|")
    }

    fn decode(text: &str) -> (Self, u32) {
        let words: Vec<&str> = text.split('|').collect();
        let orders = Self {
            rank: words[0].parse().unwrap(),
            counts: words[1].split(',').map(|c| c.parse().unwrap()).collect(),
            shares: words[2].parse().unwrap(),
            port: words[3].parse().unwrap(),
            instance: words[4].to_owned(),
            version: words[5].to_owned(),
            key: words[6].to_owned(),
            limit_ms: words[7].parse().unwrap(),
            patience_ms: words[8].parse().unwrap(),
            listen: words[9].parse().unwrap(),
            advertise: words[10].parse().unwrap(),
        };
        (orders, words[11].parse().unwrap())
    }

    fn plan(&self) -> JoinPlan {
        let loopback = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        JoinPlan {
            identity: Identity {
                instance: self.instance.clone(),
                epoch: Epoch(77),
                version: self.version.clone(),
                fingerprint: Fingerprint::default(),
            },
            topology: Topology::new(&self.counts).unwrap(),
            rank: self.rank,
            master_addr: "127.0.0.1".to_owned(),
            master_port: self.port,
            listen: Ipv4Addr::LOCALHOST.into(),
            port: self.listen,
            advertise: (self.advertise > 0).then(|| loopback(self.advertise)),
            key: PeerKey::new(self.key.as_bytes()),
            share_memory: self.shares,
            limit: Duration::from_millis(self.limit_ms),
            options: Options {
                patience: Duration::from_millis(self.patience_ms),
                ..Options::default()
            },
        }
    }
}

/// A line for the test that started this process.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "rank: {line}").unwrap();
    out.flush().unwrap();
}

/// What this program does as a rank.
fn be_rank(orders: &str) {
    let (orders, parent) = Orders::decode(orders);
    set_parent_death_signal(parent).unwrap();
    let mut group = match join(&orders.plan()) {
        Ok(joined) => joined.group,
        Err(error) => return say(&format!("refused {error}")),
    };
    if let Err(error) = start_up_test(&mut group, Epoch(77)) {
        return say(&format!("failed {error}"));
    }
    say("ready");
    let mut parts = Parts::new(orders.world());
    let send = vec![orders.rank as u8; 1000 * orders.world() as usize];
    let counts = vec![1000; orders.world() as usize];
    for step in 1.. {
        let mut values = [step; 4];
        let done = group
            .all_reduce(At::new(Epoch(77), step, 1), &[Op::Sum], &mut values)
            .and_then(|()| {
                let at = At::new(Epoch(77), step, 2);
                group.all_to_all(at, &send, &counts, 1000, &mut parts)
            });
        if let Err(error) = done {
            let cause = error.failure().cause.as_str();
            let last = error.failure().last.is_some();
            return say(&format!("ended {} {cause} {last} {error}", error.rank()));
        }
    }
}

/// A rank's process, ended with the test.
struct Rank {
    child: Child,
    lines: std::sync::mpsc::Receiver<String>,
}

impl Rank {
    fn start(orders: &Orders) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(VARIABLE, orders.encode())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = std::sync::mpsc::sync_channel(64);
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix("rank: ")
                    && sender.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Self { child, lines }
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(LONG).unwrap()
    }

    fn signal(&self, number: i32) {
        PidFd::open(self.child.id())
            .unwrap()
            .signal(number)
            .unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(orders: &Orders) -> Vec<Rank> {
    (0..orders.world())
        .map(|rank| Rank::start(&orders.of(rank)))
        .collect()
}

fn ready(ranks: &[Rank]) {
    for rank in ranks {
        assert_eq!(rank.line(), "ready");
    }
}

fn wirings() -> [(Vec<u32>, bool); 3] {
    [(vec![3], true), (vec![3], false), (vec![2, 2], true)]
}

fn a_killed_rank_is_named_at_once_by_all() {
    for ((counts, shares), port) in wirings().into_iter().zip(21_200..) {
        for victim in [0, 1] {
            let mut ranks = start(&Orders::new(&counts, shares, port + 10 * victim));
            ready(&ranks);
            let killed = ranks.remove(victim.into());
            let start = Instant::now();
            killed.signal(libc::SIGKILL);
            for rank in &ranks {
                let line = rank.line();
                let expected = format!("ended {victim} died true ");
                assert!(line.starts_with(&expected), "{counts:?}: {line}");
            }
            // Far below the 20 s that a silent rank is waited for.
            assert!(start.elapsed() < Duration::from_secs(5), "{counts:?}");
        }
    }
}

fn a_stopped_rank_is_named_when_its_time_is_over() {
    for ((counts, shares), port) in wirings().into_iter().zip(21_240..) {
        for victim in [0, 1] {
            let orders = Orders {
                patience_ms: 2000,
                ..Orders::new(&counts, shares, port + 10 * victim)
            };
            let ranks = start(&orders);
            ready(&ranks);
            let victim = usize::from(victim);
            ranks[victim].signal(libc::SIGSTOP);
            for (number, rank) in ranks.iter().enumerate() {
                if number != victim {
                    let line = rank.line();
                    let expected = format!("ended {victim} stalled true");
                    assert!(line.starts_with(&expected), "{counts:?} {number}: {line}");
                }
            }
            // It goes on, and ends with the group.
            ranks[victim].signal(libc::SIGCONT);
            let line = ranks[victim].line();
            assert!(line.starts_with("ended "), "{line}");
        }
    }
}

/// Stands before a rank and passes bytes on until it is cut.
struct Proxy {
    silent: Arc<AtomicBool>,
    streams: Arc<parking_lot::Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn start(from: u16, to: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, from)).unwrap();
        let silent = Arc::new(AtomicBool::new(false));
        let streams = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let proxy = Self {
            silent: Arc::clone(&silent),
            streams: Arc::clone(&streams),
        };
        std::thread::spawn(move || {
            for dialer in listener.incoming().map_while(Result::ok) {
                let Ok(rank) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else {
                    continue;
                };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                streams.lock().extend([clone(&dialer), clone(&rank)]);
                for (mut from, mut to) in [(clone(&dialer), clone(&rank)), (rank, dialer)] {
                    let silent = Arc::clone(&silent);
                    std::thread::spawn(move || {
                        let mut buffer = [0; 65_536];
                        while let Ok(length @ 1..) = from.read(&mut buffer) {
                            if !silent.load(Ordering::Acquire)
                                && to.write_all(&buffer[..length]).is_err()
                            {
                                break;
                            }
                        }
                    });
                }
            }
        });
        proxy
    }
}

fn a_cut_connection_ends_the_group_on_both_sides() {
    for (silent, base) in [(false, 21_280), (true, 21_290)] {
        let orders = Orders {
            patience_ms: 3000,
            ..Orders::new(&[1, 1], true, base)
        };
        // Rank 1 dials rank 0, through the proxy.
        let proxy = Proxy::start(base + 1, base + 2);
        let first = Orders {
            listen: base + 2,
            advertise: base + 1,
            ..orders.of(0)
        };
        let ranks = [Rank::start(&first), Rank::start(&orders.of(1))];
        ready(&ranks);
        if silent {
            proxy.silent.store(true, Ordering::Release);
        } else {
            for stream in proxy.streams.lock().iter() {
                stream.shutdown(Shutdown::Both).unwrap();
            }
        }
        let cause = if silent { "stalled" } else { "died" };
        for (rank, other) in ranks.iter().zip([1, 0]) {
            let line = rank.line();
            let expected = format!("ended {other} {cause} true");
            assert!(line.starts_with(&expected), "{line}");
        }
    }
}

fn ranks_that_do_not_belong_together_are_told_why() {
    type Change = fn(&mut Orders);
    let cases: [(Change, &str, &str); 4] = [
        (
            |orders| orders.version = "2".to_owned(),
            "rank 0 runs version 1, rank 1 runs version 2",
            "rank 0 runs version 1, rank 1 runs version 2",
        ),
        (
            |orders| orders.counts = vec![3],
            "rank 0 expects 2 ranks ([2] per node), rank 1 expects 3 ([3] per node)",
            "rank 0 expects 2 ranks",
        ),
        (
            |orders| orders.instance = "other".to_owned(),
            "instance deep (epoch 000000000000004d) meets there, and this rank belongs to instance other",
            "of 2 ranks these did not come within 3 s: [1]; turned away: instance deep",
        ),
        (
            |orders| orders.key = "wrong".to_owned(),
            "does not accept this side's peer key",
            "[1]; turned away: 127.0.0.1:",
        ),
    ];
    for ((change, told, host), port) in cases.into_iter().zip(21_300..) {
        let orders = Orders {
            limit_ms: 3000,
            ..Orders::new(&[2], true, port)
        };
        let first = Rank::start(&orders.of(0));
        let mut other = orders.of(1);
        change(&mut other);
        let second = Rank::start(&other);
        let line = second.line();
        assert!(line.starts_with("refused") && line.contains(told), "{line}");
        let line = first.line();
        assert!(line.starts_with("refused") && line.contains(host), "{line}");
    }
}

fn missing_and_double_ranks_are_named_to_all_who_came() {
    let orders = Orders {
        limit_ms: 2000,
        ..Orders::new(&[4], true, 21_310)
    };
    let ranks = [0, 2].map(|rank| Rank::start(&orders.of(rank)));
    for rank in &ranks {
        let line = rank.line();
        let expected = "of 4 ranks these did not come within 2 s: [1, 3]";
        assert!(line.contains(expected), "{line}");
    }
    let orders = Orders::new(&[4], true, 21_311);
    let ranks = [0, 2, 2].map(|rank| Rank::start(&orders.of(rank)));
    for rank in &ranks {
        let line = rank.line();
        assert!(line.contains("two processes say they are rank 2"), "{line}");
    }
}

fn strangers_at_the_rendezvous_do_no_harm() {
    let orders = Orders::new(&[1, 1], true, 21_320);
    let first = Rank::start(&orders.of(0));
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 21_320));
    let start = Instant::now();
    let dial = || loop {
        assert!(start.elapsed() < LONG);
        if let Ok(stream) = TcpStream::connect(address) {
            break stream;
        }
        std::thread::yield_now();
    };
    // Silent, garbage, half a message, and many at once.
    let _silent = dial();
    dial().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    dial().write_all(&[0xff; 4096]).unwrap();
    dial().write_all(b"twinfrRK").unwrap();
    let _crowd: Vec<TcpStream> = (0..100).map(|_| dial()).collect();
    let second = Rank::start(&orders.of(1));
    ready(&[first, second]);
}

fn a_port_where_something_else_answers_is_named() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 21_321)).unwrap();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; 8];
        stream.read_exact(&mut hello).unwrap();
        stream
            .write_all(
                b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
            )
            .unwrap();
        listener
    });
    let orders = Orders::new(&[2], true, 21_321);
    let line = Rank::start(&orders.of(1)).line();
    assert!(line.contains("127.0.0.1:21321"), "{line}");
    assert!(
        line.contains("does not speak the protocol of this port"),
        "{line}"
    );
    // And the first rank can't listen where somebody does.
    let _listener = answering.join().unwrap();
    let line = Rank::start(&orders.of(0)).line();
    assert!(
        line.contains("cannot listen on 127.0.0.1:21321 for the rendezvous"),
        "{line}"
    );
}

fn nothing_is_left_of_a_group_in_the_file_system() {
    let names = || {
        let files = std::fs::read_dir("/dev/shm").map(|files| {
            files
                .flatten()
                .map(|file| (file.file_name(), ()))
                .collect::<BTreeMap<_, _>>()
        });
        files.unwrap_or_default()
    };
    let before = names();
    let ranks = start(&Orders::new(&[2], true, 21_322));
    ready(&ranks);
    drop(ranks);
    let left: Vec<_> = names()
        .into_keys()
        .filter(|name| {
            !before.contains_key(name) && name.to_string_lossy().contains("twinfer-comm")
        })
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
