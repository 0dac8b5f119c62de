//! The options of `xtrain completions`.

use clap::Args;
use clap_complete::Shell;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain completions bash > ~/.local/share/bash-completion/completions/xtrain
  xtrain completions zsh > ~/.zfunc/_xtrain      (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  xtrain completions fish > ~/.config/fish/completions/xtrain.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell to write for
    pub(crate) shell: Shell,
}
