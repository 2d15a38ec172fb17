//! What a QEMU process of ours may not have.
//!
//! Entry points: [`confined`], [`without_network`].

/// An unprivileged user, no capability, no way to gain one, system calls filtered, no socket or file of
/// ours beyond what it needs.
pub(crate) fn confined(pid: u32) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_ascii_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(field("Uid:"), ["3000001"; 4].join(" "));
    assert_eq!(field("Gid:"), ["3000001"; 4].join(" "));
    assert_eq!(field("Groups:"), "");
    assert_eq!(field("CapEff:"), "0000000000000000");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    assert_eq!(std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim(), "500");
    let databases = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter(|fd| {
        let target = std::fs::read_link(fd.as_ref().unwrap().path()).unwrap_or_default();
        target.to_string_lossy().contains("engine.db")
    });
    assert_eq!(databases.count(), 0, "QEMU holds the records");
    without_network(pid);
}

/// A network namespace that is not ours, with no interface but lo: the tap is a descriptor, no more.
pub(crate) fn without_network(pid: u32) {
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(namespace(&pid.to_string()), namespace("self"));
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
    let names: Vec<&str> = table.lines().skip(2).filter_map(|line| line.trim().split(':').next()).collect();
    assert_eq!(names, ["lo"], "{table}");
}
