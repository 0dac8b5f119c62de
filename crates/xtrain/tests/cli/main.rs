//! The real binary from outside: what it does to folders, what it says, and which exit code it ends with.
//!
//! Every test has a folder of its own and models of a few thousand parameters. What is random (moments of
//! kills, mutated bytes) comes from one seed, which is printed: `XTRAIN_TEST_SEED=<number>` tries others.

#![cfg(unix)]

#[path = "../../../../tests/fragments.rs"]
mod fragments;
#[path = "../../../../tests/messages.rs"]
mod messages;

mod adapters;
mod bad_config;
mod bad_data;
mod bad_model;
mod benching;
mod best;
mod blaming;
mod chat_keys;
mod chat_refused;
mod chat_tools;
mod chat_vocabulary;
mod chats;
mod choosing;
mod comparing;
mod comparing_tasks;
mod data_sets;
mod dice;
mod diverging;
mod doctor;
mod ending;
mod evaluating;
mod experts;
mod exporting;
mod generating;
mod help;
mod init;
mod inspecting;
mod log_command;
mod merge;
mod mistakes;
mod muon;
mod mutated;
mod pasted;
mod place;
mod plan;
mod plan_of_ranks;
mod profiling;
mod ranks;
mod reference;
mod resume;
mod run_folder;
mod saved_by_ranks;
mod scoring;
mod scoring_answers;
mod scoring_files;
mod scoring_runs;
mod static_scales;
mod stopping;
mod storage;
mod switching;
mod terminals;
mod texts;
mod watching;
