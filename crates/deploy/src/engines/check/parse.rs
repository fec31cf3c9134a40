//! What the machine tools print, read tolerantly: spacing differs by version, and success text may end an
//! output that reports losses. Pure.

/// What an output says of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Fine; what was read, where later checks need it.
    Good(String),
    /// A fault.
    Bad(String),
    /// It is no output that is known.
    Unknown(String),
}

use Reading::{Bad, Good, Unknown};

/// Failures that any sub-command of hccn_tool may print.
const FAILURES: &[&str] = &[
    "hccn_tool is busy",
    "The command is not supported on this product",
    "permission denied",
    "The device is occupied",
    "The cmd line execute timeout",
    "Cmd execute failed",
    "can't access",
    "Link status is down",
    "command not found",
    "No such file or directory",
];

/// A failure of the tool itself.
pub(crate) fn failure(text: &str) -> Option<String> {
    let line = text.lines().find(|line| {
        FAILURES
            .iter()
            .any(|failure| line.to_lowercase().contains(&failure.to_lowercase()))
    })?;
    Some(short(line))
}

/// A line for a message: a tool's output may hold anything.
pub(crate) fn short(text: &str) -> String {
    let line = text
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or_default();
    line.trim()
        .chars()
        .take(160)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Text behind `key` and a colon, on the first line that has it.
fn after<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let at = line.find(key)?;
        let rest = line[at + key.len()..].trim_start();
        rest.strip_prefix(':').map(str::trim)
    })
}

/// `link status: UP`.
pub(crate) fn link(text: &str) -> Reading {
    match after(text, "link status") {
        Some("UP") => Good("UP".to_owned()),
        Some("DOWN") => Bad("link is DOWN".to_owned()),
        _ => Unknown(short(text)),
    }
}

/// `net health status: Success`. `Init` is fine only where no detect address is set.
pub(crate) fn health(text: &str, netdetect: Option<&str>) -> Reading {
    match after(text, "net health status") {
        Some("Success") => Good("Success".to_owned()),
        Some("Init") => match netdetect.map(detect_address) {
            Some(Good(address)) if address == "0.0.0.0" => {
                Good("Init, no detect address".to_owned())
            }
            _ => Bad("net health is Init although a detect address is set".to_owned()),
        },
        Some(
            state @ ("Socket fail" | "Receive timeout" | "Unreachable" | "Time exceeded" | "Fault"
            | "Thread error" | "Detect ip set" | "Unknown"),
        ) => Bad(format!("net health is {state}")),
        _ => Unknown(short(text)),
    }
}

/// `netdetect address: 10.0.0.1`, or `netdetect addr: ...`.
pub(crate) fn detect_address(text: &str) -> Reading {
    match after(text, "netdetect address").or_else(|| after(text, "netdetect addr")) {
        Some(address) if address.parse::<std::net::IpAddr>().is_ok() => Good(address.to_owned()),
        _ => Unknown(short(text)),
    }
}

/// `default gateway:10.0.0.1, Iface:eth0`.
pub(crate) fn gateway(text: &str) -> Reading {
    if text.contains("no gateway was preset") {
        return Bad("no gateway is set".to_owned());
    }
    match after(text, "default gateway").and_then(|rest| rest.split(',').next()) {
        Some(address) if address.trim().parse::<std::net::IpAddr>().is_ok() => {
            Good(address.trim().to_owned())
        }
        _ => Unknown(short(text)),
    }
}

/// `ipaddr:10.0.0.1` of `-ip -g`, or `vnic ipaddr: 10.0.0.1` of `-vnic -g`.
pub(crate) fn address(text: &str) -> Reading {
    if text.contains("no ip was preset") {
        return Bad("no address is set".to_owned());
    }
    if after(text, "vnic link status") == Some("DOWN") {
        return Bad("vnic link is DOWN".to_owned());
    }
    match after(text, "ipaddr") {
        Some("0.0.0.0") => Bad("the address is 0.0.0.0".to_owned()),
        Some(address) if address.parse::<std::net::IpAddr>().is_ok() => Good(address.to_owned()),
        _ => Unknown(short(text)),
    }
}

/// `dev_id:0, tls switch[0](0:disable, 1:enable), ...`: the switch.
pub(crate) fn tls(text: &str) -> Reading {
    let switch = text
        .split_once("tls switch[")
        .and_then(|(_, rest)| rest.split_once(']'))
        .map(|(switch, _)| switch.trim());
    match switch {
        Some(switch @ ("0" | "1")) => Good(switch.to_owned()),
        _ => Unknown(short(text)),
    }
}

/// `Ifname: 400GE1/1/5:1` of `-lldp -g`.
pub(crate) fn neighbour(text: &str) -> Reading {
    match after(text, "Ifname") {
        Some(name) if !name.is_empty() => Good(name.to_owned()),
        _ => Unknown(short(text)),
    }
}

/// Counters of `-ping -g` and `-hccs_ping -g`: `3 packets transmitted, 3 received, 0.00% packet loss` (or
/// `packets loss`). Text of success counts for nothing; a plane check other than 0 is a fault.
pub(crate) fn ping(text: &str) -> Reading {
    let plane = text.lines().find(|line| {
        line.split_once("plane check result")
            .is_some_and(|(_, rest)| {
                let value = rest.trim_start_matches([' ', '=']).trim();
                let value = value.split([',', ' ']).next().unwrap_or_default();
                !matches!(value, "0" | "0x0" | "0x00")
            })
    });
    if let Some(line) = plane {
        return Bad(short(line));
    }
    let counters = text.lines().find(|line| line.contains("transmitted"));
    let numbers: Vec<f64> = counters
        .into_iter()
        .flat_map(|line| line.split([',', ' ', '%']))
        .filter_map(|word| word.parse().ok())
        .collect();
    let [sent, received, loss, ..] = numbers[..] else {
        return Unknown(short(text));
    };
    if sent > 0.0 && received == sent && loss == 0.0 {
        Good(format!("{received} of {sent}"))
    } else {
        Bad(format!("{received} of {sent} received, {loss}% lost"))
    }
}

/// SDID and Super Pod ID of `npu-smi info -t spod-info`.
pub(crate) fn spod(text: &str) -> Reading {
    match (
        after_padded(text, "SDID"),
        after_padded(text, "Super Pod ID"),
    ) {
        (Some(sdid), Some(pod)) if sdid.parse::<u64>().is_ok() && pod.parse::<i64>().is_ok() => {
            Good(format!("{sdid} {pod}"))
        }
        _ => Unknown(short(text)),
    }
}

fn after_padded<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == key).then(|| value.trim())
    })
}

/// Processes on devices, of `npu-smi info`: none, or the first foreign one.
pub(crate) fn processes(text: &str) -> Reading {
    if text.contains("No running processes found") {
        return Good("none".to_owned());
    }
    let mut inside = false;
    for line in text.lines() {
        if line.contains("Process id") {
            inside = true;
            continue;
        }
        if !inside {
            continue;
        }
        let cells: Vec<&str> = line
            .split('|')
            .map(str::trim)
            .filter(|cell| !cell.is_empty())
            .collect();
        if let [device, process, name, ..] = cells[..]
            && process.parse::<u32>().is_ok()
        {
            let device = device.split_whitespace().next().unwrap_or(device);
            return Bad(format!(
                "process {process} ({}) uses NPU {device}",
                short(name)
            ));
        }
    }
    if inside {
        Good("none".to_owned())
    } else {
        Unknown(short(text))
    }
}

/// Interface that has `host`, of `ip -o addr`.
pub(crate) fn interface(text: &str, nic: Option<&str>, host: &str) -> Reading {
    let mut names = Vec::new();
    let mut any = false;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words
            .iter()
            .position(|word| matches!(*word, "inet" | "inet6"));
        let (Some(at), Some(name)) = (at, words.get(1)) else {
            continue;
        };
        any = true;
        let address = words.get(at + 1).and_then(|word| word.split('/').next());
        if address == Some(host) {
            names.push((*name).to_owned());
        }
        if Some(*name) == nic && address == Some(host) {
            return Good((*name).to_owned());
        }
    }
    match (any, nic, names.first()) {
        (false, ..) => Unknown(short(text)),
        (true, None, Some(name)) => Good(name.clone()),
        (true, Some(nic), Some(name)) => Bad(format!("{host} is on {name}, not on {nic}")),
        (true, _, None) => Bad(format!("no interface has {host}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good(reading: Reading) -> String {
        match reading {
            Good(text) => text,
            other => panic!("{other:?}"),
        }
    }

    fn bad(reading: Reading) -> String {
        match reading {
            Bad(text) => text,
            other => panic!("{other:?}"),
        }
    }

    fn unknown(reading: &Reading) -> bool {
        matches!(reading, Unknown(_))
    }

    #[test]
    fn good_outputs_are_read() {
        assert_eq!(
            good(address("ipaddr:11.12.165.80\nnetmask:255.255.255.0\n")),
            "11.12.165.80"
        );
        assert_eq!(
            good(address(
                "vnic link status: UP\nvnic ipaddr: 192.168.2.199\nvnic netmask: 255.255.255.0\n"
            )),
            "192.168.2.199"
        );
        assert_eq!(good(link("link status: UP\n")), "UP");
        assert_eq!(
            good(health("net health status: Success\n", None)),
            "Success"
        );
        assert_eq!(
            good(detect_address("netdetect address: 11.12.165.1\n")),
            "11.12.165.1"
        );
        assert_eq!(good(detect_address("netdetect addr: 0.0.0.0\n")), "0.0.0.0");
        assert_eq!(
            good(gateway("default gateway:11.12.165.1, Iface:eth0\n")),
            "11.12.165.1"
        );
        assert_eq!(
            good(tls(
                "dev_id:0, tls switch[0](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), tls alarm time threshold[60]days\n"
            )),
            "0"
        );
        assert_eq!(
            good(tls("device 0, tls switch[1](0:disable, 1:enable)\n")),
            "1"
        );
        assert_eq!(
            good(neighbour(
                "Port ID TLV\n\tIfname: 400GE1/1/5:1\nTime to Live TLV\n"
            )),
            "400GE1/1/5:1"
        );
        let ok = "device 0 PING 11.12.165.80\nrecv seq=0,time=0.114000ms\n3 packets transmitted, 3 received, 0.00% packet loss\n";
        assert_eq!(good(ping(ok)), "3 of 3");
        let hccs = "device 0 PING 192.168.3.1\nThis pkt ping success!\nrecv seq 0, time = 5.123us, L1 plane check result = 0x0\n3 packets transmitted, 3 received, 0.00% packets loss\nCmd executed successfully!\n";
        assert_eq!(good(ping(hccs)), "3 of 3");
        let pod = "\tSDID                           : 16777216\n\tSuper Pod Size                 : 384\n\tSuper Pod ID                   : 0\n\tServer Index                   : 4\n";
        assert_eq!(good(spod(pod)), "16777216 0");
        assert_eq!(
            good(processes("| No running processes found in NPU 0 |\n")),
            "none"
        );
        assert_eq!(
            good(interface(
                "2: eth0    inet 10.0.0.1/24 scope global eth0\n",
                Some("eth0"),
                "10.0.0.1"
            )),
            "eth0"
        );
    }

    #[test]
    fn bad_outputs_are_faults() {
        assert_eq!(bad(link("link status: DOWN\n")), "link is DOWN");
        assert_eq!(
            bad(address(
                "Get ipconf failed, because no ip was preset there!"
            )),
            "no address is set"
        );
        assert_eq!(
            bad(gateway(
                "Get gateway failed, because no gateway was preset there!"
            )),
            "no gateway is set"
        );
        for state in [
            "Socket fail",
            "Receive timeout",
            "Unreachable",
            "Time exceeded",
            "Fault",
            "Thread error",
            "Detect ip set",
            "Unknown",
        ] {
            assert_eq!(
                bad(health(&format!("net health status: {state}\n"), None)),
                format!("net health is {state}")
            );
        }
        let loss = "recv time out seq=1\n3 packets transmitted, 2 received, 33.33% packet loss\n";
        assert_eq!(bad(ping(loss)), "2 of 3 received, 33.33% lost");
        // Success may end an output with losses.
        let lying = "This pkt send fail!\n3 packets transmitted, 0 received, 100.00% packets loss\nCmd executed successfully!\n";
        assert_eq!(bad(ping(lying)), "0 of 3 received, 100% lost");
        let plane = "recv seq 0, time = 5us, L1 plane check result = 0x3\n3 packets transmitted, 3 received, 0.00% packets loss\n";
        assert!(bad(ping(plane)).contains("0x3"));
        let table = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n+====+\n| 0       0                 | 4711          | python3                  | 3127 |\n";
        assert_eq!(bad(processes(table)), "process 4711 (python3) uses NPU 0");
        assert_eq!(
            bad(interface(
                "2: bond0    inet 10.0.0.1/24 scope global\n",
                Some("eth0"),
                "10.0.0.1"
            )),
            "10.0.0.1 is on bond0, not on eth0"
        );
    }

    #[test]
    fn init_is_fine_only_without_a_detect_address() {
        let init = "net health status: Init\n";
        assert_eq!(
            good(health(init, Some("netdetect address: 0.0.0.0"))),
            "Init, no detect address"
        );
        assert!(
            bad(health(init, Some("netdetect address: 10.0.0.1")))
                .contains("detect address is set")
        );
        assert!(bad(health(init, None)).contains("Init"));
    }

    #[test]
    fn what_is_not_known_is_never_good() {
        for text in [
            "",
            "link status: maybe",
            "Cmd executed successfully!",
            "\u{0}\u{1b}[31m",
            "3 packets transmitted",
        ] {
            for reading in [
                link(text),
                health(text, None),
                address(text),
                tls(text),
                gateway(text),
                ping(text),
                spod(text),
                processes(text),
                neighbour(text),
            ] {
                assert!(unknown(&reading), "{text:?}: {reading:?}");
            }
        }
        assert!(failure("hccn_tool is busy, please try again.").is_some());
        assert!(failure("link status: UP").is_none());
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_parser_panic(text in "\\PC{0,200}|[0-9a-z :,%\\n\\[\\]|=]{0,200}") {
            let _ = (link(&text), health(&text, Some(&text)), address(&text), tls(&text), gateway(&text), ping(&text));
            let _ = (spod(&text), processes(&text), neighbour(&text), interface(&text, Some("eth0"), "10.0.0.1"), failure(&text));
        }
    }
}
