//! Which command lines are understood, and as what.

use super::*;

fn words(line: &str) -> Vec<OsString> {
    std::iter::once("cocoon")
        .chain(line.split(' ').filter(|word| !word.is_empty()))
        .map(OsString::from)
        .collect()
}

fn flags_of(line: &str) -> Flags {
    let cli = parse(words(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
    let after = match cli.role {
        Role::Vm(group) => group.flags,
        Role::Snapshot(group) => group.flags,
        Role::Image(group) => group.flags,
        Role::Gc { flags } => flags,
        Role::Net(args) => args.flags,
        Role::Version | Role::Up(_) => Flags::default(),
    };
    after.or(cli.flags)
}

#[test]
fn the_command_is_well_formed() {
    command().debug_assert();
}

#[test]
fn every_call_of_the_contract_is_understood() {
    for line in [
        "vm run --output json --name n --cpu 2 --memory 1073741824 --storage 10737418240 --network x --nics 1 img",
        "vm run --output json --name n --cpu-weight 1 --cpu-quota-us 2 --cpu-period-us 3 img",
        "vm run --fc --windows --no-direct-io img",
        "vm run --nics -1 --name x img",
        "vm run --data-disk size=16M,name=a --data-disk size=16M img",
        "vm run --user root --password secret --bridge br0 --queue-size 0 --disk-queue-size 0 img",
        "vm clone --output json --name n --no-direct-io --pull --restore-mode mmap --nics 1 snap",
        "vm clone --on-demand --cpu 0 --memory 1G --storage 10G snap",
        "vm clone --name n --from-dir /x --pull",
        "vm inspect x",
        "vm list",
        "vm ls -o json",
        "vm list --format yaml",
        "vm list --output json",
        "vm start x y -o json",
        "vm stop --force --timeout 5 -o json x",
        "vm stop --force --force --timeout 5 --timeout 6 x",
        "vm rm --force x y",
        "vm rm -o json x",
        "vm exec -i -e A=b -e C=d x -- sh -c true",
        "vm exec x -- ls -l",
        "vm logs --tail 5 x",
        "vm logs --raw x",
        "snapshot save --name n --description d x",
        "snapshot save x",
        "snapshot list -o json --vm x",
        "snapshot ls",
        "snapshot inspect repo/x:1",
        "snapshot rm a b",
        "snapshot rm --force a",
        "image import name",
        "image import --strip-setuid name a.tar b.tar",
        "image list -o json",
        "image inspect x",
        "image rm a b",
        "image rm --force a",
        "gc",
        "version",
    ] {
        if let Err(error) = parse(words(line)) {
            panic!("{line}: {error}");
        }
    }
}

#[test]
fn malformed_calls_are_refused() {
    for line in [
        "",
        "--bogus",
        "bogus",
        "vm",
        "vm bogus",
        "vm inspect",
        "vm run",
        "vm run --cpu x img",
        "vm run --bridge b --network n img",
        "vm clone",
        "vm clone --restore-mode bogus s",
        "vm clone --from-dir /x snap",
        "vm list --bogus",
        "vm exec x",
        "vm exec x ls",
        "vm rm",
        "snapshot save",
        "snapshot rm",
        "image import",
        "image rm",
    ] {
        assert!(parse(words(line)).is_err(), "{line}");
    }
}

#[test]
fn global_flags_may_stand_before_or_after_the_command_and_the_later_one_wins() {
    for line in [
        "--root-dir /a vm list",
        "vm --root-dir /a list",
        "vm list --root-dir /a",
        "--root-dir /b vm list --root-dir /a",
        "gc --root-dir /a",
        "--root-dir /b --root-dir /a vm list",
        "vm list --root-dir /b --root-dir /a",
        "snapshot ls --root-dir /a",
        "image ls --root-dir=/a",
        "net teardown --root-dir /a",
        "net --root-dir /a daemon",
        "--root-dir /a net teardown --force",
    ] {
        assert_eq!(flags_of(line).root_dir.as_deref(), Some(std::path::Path::new("/a")), "{line}");
    }
    let all = flags_of(
        "--config c --root-dir r --run-dir u --log-dir l --cni-conf-dir a --cni-bin-dir b --dns 1.1.1.1 \
         --log-level warn --boot-bundle o --network-dir n --qemu q vm list",
    );
    assert_eq!(all.dns.as_deref(), Some("1.1.1.1"));
    assert!(
        all.config.is_some() && all.boot_bundle.is_some() && all.network_dir.is_some() && all.qemu.is_some()
    );
}

#[test]
fn a_network_command_finds_its_folder_as_the_others_do_unless_it_names_one() {
    for (line, folder) in [
        ("net teardown --root-dir /a", "/a/net"),
        ("--root-dir /a net daemon", "/a/net"),
        ("net teardown --root-dir /a --network-dir /n", "/n"),
        ("net teardown --root-dir /a --state-dir /s", "/s"),
        ("--network-dir /n net daemon --state-dir /s", "/s"),
    ] {
        let cli = parse(words(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
        let Role::Net(args) = cli.role else { panic!("{line}") };
        let settings = args.settings(args.flags.clone().or(cli.flags)).unwrap();
        assert_eq!(settings.network_dir, std::path::Path::new(folder), "{line}");
    }
}

#[test]
fn a_guests_exit_code_passes_and_a_signal_is_255() {
    for (code, exit) in [(0, 0), (3, 3), (255, 255), (-1, 255), (256, 0)] {
        assert_eq!(Exit::from_guest(code), Exit(exit));
    }
}

#[test]
fn every_command_has_an_example_that_parses_and_says_how_it_ends() {
    fn check(command: &clap::Command, path: &str) {
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            let path = format!("{path} {}", sub.get_name());
            let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{path}: {help}");
            if sub.get_subcommands().next().is_none() {
                assert!(help.contains("Exit status: "), "{path}: {help}");
                let ours = help.lines().map(str::trim).filter(|line| line.starts_with("cocoon "));
                let mut examples = 0;
                for line in ours {
                    parse(words(line.trim_end_matches(" &"))[1..].to_vec())
                        .unwrap_or_else(|error| panic!("{line}: {error}"));
                    examples += 1;
                }
                assert!(examples > 0, "{path} has no example");
            }
            check(sub, &path);
        }
    }
    check(&command(), "cocoon");
}
