//! Hostile templates end soon and small (C9.5). Own process, so that the peak of memory is theirs.

use serde_json::json;
use std::time::{Duration, Instant};
use twinfer_text::{ChatTemplate, TemplateError, TemplateState};

/// Peak resident memory of this process, in KiB.
#[cfg(test)]
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn hostile_templates_stop_within_two_seconds_and_100_mib() {
    // The guard lets the probe at load pass, so that each request meets the bomb.
    let bombs = [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ ['x'] * 1000000000 }}",
        "{{ range(1000000000) | list | length }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson(indent=16) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format('x', 1000000000) }}",
        "{{ ('{0}' * 100000).format('x' * 100000) }}",
        "{{ ('{a}' * 100000).format(a='x' * 100000) }}",
        "{{ ('{0[k]}' * 100000).format({'k': 'x' * 100000}) }}",
        "{{ ('{0}' * 100000).format(['x' * 100000]) }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ '{}'.format(ns.s) }}",
        "{{ '%*d' | format(1000000000, 1) }}",
        "{{ '%.1000000000f' % 1.5 }}",
        "{{ 'x' | wordwrap(1000000000) | indent(100000000, true) }}",
        "{{ 'x\nx' | indent(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ [1, 2] | join('x' * 100000000) }}",
        "{{ [[1], [1]] | tojson(separators=('x' * 100000000, ':')) }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ 'x'.join(range(100000000)) }}",
    ];
    for bomb in bombs {
        let source = format!("{{% if messages | length > 1 %}}{bomb}{{% endif %}}");
        let template = ChatTemplate::from_source(&source, "", "");
        assert_eq!(*template.state(), TemplateState::Ready, "{bomb}");
        let messages = json!([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]);
        let (start, before) = (Instant::now(), peak());
        let result = template.render(&messages, true, None, None);
        assert!(
            matches!(
                result,
                Err(TemplateError::Limit(_) | TemplateError::Failed(_))
            ),
            "{bomb}"
        );
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{bomb}: {:?}",
            start.elapsed()
        );
        assert!(
            peak() - before < 100 << 10,
            "{bomb}: {} KiB",
            peak() - before
        );
    }
}
