//! Parts that the processes of these tests play.

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;
use xtrain_distributed::{
    Cause, CommError, Communicator, Control, Environment, RankLauncher, SECRET_VARIABLE, Secret,
    StartOptions, TcpCommunicator, Variables, World, die_with_launcher,
};

const LONG: Duration = Duration::from_secs(60);

/// Plays the part that the arguments name.
pub(crate) fn play(args: &[String]) -> ExitCode {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    if let ["launcher", ranks, role @ ..] = &args[..] {
        return launcher(ranks.parse().expect("a number"), role);
    }
    let variables = Variables::of_process();
    if let Err(e) = die_with_launcher(&variables) {
        say(&format!("error: {e}"));
        return ExitCode::from(2);
    }
    let world =
        Environment::detect(&variables).expect("an environment").map_or_else(World::single, |e| e.world);
    let result = match args[..] {
        ["collectives"] => collectives(&world, &variables),
        ["loop"] => endless(&world, &variables),
        ["echo"] => echo(&world),
        ["fail", rank, code] => return fail(&world, rank, code),
        ["stubborn"] => {
            for signal in [SIGTERM, SIGINT] {
                signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).expect("a handler");
            }
            sleep(&world)
        }
        ["signals"] => signals(&world),
        ["sleep"] => sleep(&world),
        ["orphan"] => orphan(&world),
        _ => panic!("no such role: {args:?}"),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&format!("error: {e}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a line in one call, so that lines of several ranks do not mix.
fn say(line: &str) {
    std::io::stderr().write_all(format!("{line}\n").as_bytes()).expect("a reader");
}

fn launcher(ranks: usize, role: &[&str]) -> ExitCode {
    let args = [&["role"], role].concat().into_iter().map(Into::into).collect();
    let launch = RankLauncher::copies(ranks, args).expect("a path");
    let code = RankLauncher { grace: Duration::from_millis(1500), ..launch }.run().expect("a launch");
    ExitCode::from(code as u8)
}

fn start(world: &World, variables: &Variables) -> Result<(Arc<Control>, TcpCommunicator), CommError> {
    let secret = Secret::value(variables.get(SECRET_VARIABLE).unwrap_or_default())?;
    let silence = Duration::from_secs(3);
    let control =
        Control::start(world, &secret, StartOptions { deadline: LONG, silence, ..Default::default() })?;
    let control = Arc::new(control);
    let communicator = TcpCommunicator::connect(&control, LONG)?;
    Ok((control, communicator))
}

fn ready(world: &World) {
    say(&format!("ready {} {}", world.rank.index, std::process::id()));
}

fn collectives(world: &World, variables: &Variables) -> Result<(), CommError> {
    let (control, communicator) = start(world, variables)?;
    let (n, rank) = (world.rank.world_size, world.rank.index);
    for size in [0, 1, 999, 1_000_000] {
        let mut gathered = vec![0; n * size];
        communicator.all_gather(communicator.world(), 1, &vec![rank as u8; size], &mut gathered)?;
        let expected: Vec<u8> = (0..n).flat_map(|piece| vec![((1 + piece) % n) as u8; size]).collect();
        assert!(gathered == expected, "all_gather of {size} bytes");
        let mut received = vec![0; n * size];
        communicator.all_to_all(communicator.world(), 0, &gathered, &mut received)?;
        let expected = vec![((1 + rank) % n) as u8; n * size];
        assert!(received == expected, "all_to_all of {size} bytes");
    }
    say("a warning");
    println!("rank {rank} of {n}: all collectives are right");
    control.finish()
}

/// Collectives until the run ends.
fn endless(world: &World, variables: &Variables) -> Result<(), CommError> {
    let (control, communicator) = start(world, variables)?;
    ready(world);
    let input = vec![1; world.rank.world_size * 10_000];
    let mut output = input.clone();
    loop {
        if let Err(error) = communicator.all_to_all(communicator.world(), 0, &input, &mut output) {
            return Err(CommError::Aborted(control.abort(Cause::Failure, &error.to_string())));
        }
    }
}

fn echo(world: &World) -> Result<(), CommError> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line or the end");
    println!("rank {} read: {}", world.rank.index, line.trim());
    Ok(())
}

fn fail(world: &World, rank: &str, code: &str) -> ExitCode {
    println!("printed by rank {}", world.rank.index);
    if world.rank.index.to_string() == rank {
        return ExitCode::from(code.parse::<u8>().expect("a code"));
    }
    thread::sleep(LONG);
    ExitCode::SUCCESS
}

fn sleep(world: &World) -> Result<(), CommError> {
    ready(world);
    // A signal does not end it.
    thread::sleep(LONG);
    Ok(())
}

/// Leaves a process behind that has the outputs of a rank open.
fn orphan(world: &World) -> Result<(), CommError> {
    if world.rank.index == 0 {
        return Ok(());
    }
    let sleeper = Command::new("sleep").arg("40").stdin(Stdio::null()).spawn();
    sleeper.map(drop).map_err(|e| CommError::System(e.to_string()))
}

fn signals(world: &World) -> Result<(), CommError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1]).expect("handlers");
    ready(world);
    if let Some(signal) = signals.forever().next() {
        say(&format!("got {}", signal_hook::low_level::signal_name(signal).expect("a name")));
    }
    Ok(())
}
