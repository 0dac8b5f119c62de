//! The bytes that communicators send are those of the plan.

use crate::world::World;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use xtrain_distributed::{
    Communicator, Control, Secret, StartOptions, TcpCommunicator, ThreadCommunicator, World as Place,
};
use xtrain_model::Recipe;
use xtrain_program::{Payload, Reduce, Shard};
use xtrain_rank::Rank;
use xtrain_step::programs;
use xtrain_tensor::DType;

/// Runs every shard mode, once for all micro-batches and once with accumulation.
fn worlds(ranks: usize) -> impl Iterator<Item = World> {
    let modes = [Shard::None, Shard::Optimizer, Shard::Gradients, Shard::Weights];
    modes.into_iter().flat_map(move |shard| {
        let of = |recipe, micro_steps| {
            let alone = World::alone(recipe, micro_steps == 3, micro_steps);
            World { ranks, shard, ..alone }
        };
        let in_bf16 = [of(Recipe::Bf16, 1), of(Recipe::Fp8Delayed, 3)];
        let in_bf16 = in_bf16.map(|world| World { reduce_dtype: DType::BF16, ..world });
        in_bf16.into_iter().chain([World { reduce: Reduce::Fast, ..of(Recipe::Bf16, 3) }])
    })
}

/// Fails unless two steps send what the plan says.
pub(crate) fn assert_sends_as_planned(world: &World, communicator: Arc<dyn Communicator>) {
    let program = programs::training(&world.spec(communicator.rank())).expect("a program");
    let planned: u64 = program.traffic(world.micro_steps).iter().map(|sent| sent.step_bytes()).sum();
    let mut learner = world.learner(communicator.clone());
    learner.weights().initialize(5, 0.1).expect("weights");
    for number in 0..2 {
        let before = communicator.sent_bytes();
        world.step(&mut learner, number);
        assert_eq!(communicator.sent_bytes() - before, planned, "{world:?}, step {number}");
    }
}

#[test]
fn threads_send_as_many_bytes_as_planned() {
    for world in worlds(3) {
        let world = &world;
        thread::scope(|scope| {
            for communicator in ThreadCommunicator::world(world.ranks) {
                scope.spawn(move || assert_sends_as_planned(world, Arc::new(communicator)));
            }
        });
    }
}

#[test]
fn processes_send_as_many_bytes_over_tcp_as_planned() {
    let limit = Duration::from_secs(60);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    drop(listener);
    let place = |rank| Place { rank, local_rank: rank, address: "127.0.0.1".into(), port };
    thread::scope(|scope| {
        for rank in Rank::all(2) {
            scope.spawn(move || {
                let secret = Secret::value("0123456789abcdef0123456789abcdef").expect("a long secret");
                let start = StartOptions { deadline: limit, ..StartOptions::default() };
                let control = Arc::new(Control::start(&place(rank), &secret, start).expect("a run"));
                let communicator = Arc::new(TcpCommunicator::connect(&control, limit).expect("ranks"));
                for world in worlds(2) {
                    assert_sends_as_planned(&world, communicator.clone());
                }
                control.finish().expect("an end in order");
            });
        }
    });
}

#[test]
fn payloads_are_told_apart_in_every_mode() {
    let of = |shard| {
        let world = World { ranks: 2, shard, ..World::alone(Recipe::Bf16, false, 3) };
        let program = programs::training(&world.spec(0)).expect("a program");
        let sent = program.traffic(world.micro_steps);
        let times = |payload| {
            let of_payload = sent.iter().filter(|of| of.payload == payload);
            of_payload.map(|of| of.times).max().unwrap_or(0)
        };
        Payload::ALL.map(times)
    };
    assert_eq!(of(Shard::None), [0, 1, 0, 0, 0, 0, 1]);
    assert_eq!(of(Shard::Optimizer), [0, 1, 0, 0, 0, 1, 1]);
    assert_eq!(of(Shard::Gradients), [0, 3, 0, 0, 0, 1, 1]);
    assert_eq!(of(Shard::Weights), [3, 3, 0, 0, 0, 0, 1]);
}
