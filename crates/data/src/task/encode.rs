//! Requests as tokens: the protocol of lm-eval 0.4.13 with `--model hf` (`TemplateLM.loglikelihood` and
//! `_encode_pair` in `lm_eval/api/model.py`, `HFLM.tok_encode` and `_loglikelihood_tokens` in
//! `lm_eval/models/huggingface.py`).
//!
//! 1. White space at the end of the context, as Python's `rstrip` has it, moves to the continuation.
//! 2. The context, and both texts together, are encoded with the names of special tokens recognised, after
//!    the tokens that the tokenizer's template puts before a text, unless the text begins with the name of
//!    the prefix token. Tokens of the continuation are those after as many as the context has, even if the
//!    tokenizer joined the two.
//! 3. Before a continuation without a context stands the prefix token (the tokenizer's `bos_token`, else its
//!    `eos_token`), unless the continuation begins with it.
//! 4. Of more than `max_tokens + 1` tokens the last ones are used. All but the last are read.
//!
//! Before a generated answer (`HFLM.tok_batch_encode`) the context alone is encoded, as in 2., with the white
//! space at its end; of too many tokens the last ones are used. An empty context is the prefix token.
//!
//! Deviation: tokens that a template puts after a text are never added.

use std::sync::Arc;

use super::fault::shown;
use super::python_text::split_end;
use super::row::Request;
use crate::error::{DataError, Result};
use crate::tokenizer::{SpecialTokens, Tokenizer};

/// A request as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedRequest {
    /// Tokens of context and continuation, at most one more than a model reads. The last is not read.
    pub tokens: Vec<u32>,
    /// Number of last tokens that are targets; at least one, and fewer than there are tokens.
    pub scored: usize,
    /// Number of tokens at the start of the context that were left out.
    pub truncated: usize,
}

/// The text before a generated answer as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// The tokens, at least one.
    pub tokens: Vec<u32>,
    /// Number of tokens at the start of the text that were left out.
    pub truncated: usize,
}

/// Encodes a request for a model that reads `max_tokens` tokens.
///
/// # Errors
/// A continuation without a token of its own after the context, or with more than `max_tokens`; a context
/// without a token before its trailing white space; errors of the tokenizer.
pub fn encode(tokenizer: &Tokenizer, request: &Request, max_tokens: usize) -> Result<EncodedRequest> {
    RequestEncoder::new(tokenizer, max_tokens).encode(request)
}

/// An encoder of requests, which encodes a context of successive ones once.
pub(super) struct RequestEncoder<'t> {
    tokenizer: &'t Tokenizer,
    max_tokens: usize,
    /// The context of the last request and its tokens.
    last: Option<(Arc<str>, Vec<u32>)>,
}

impl<'t> RequestEncoder<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, max_tokens: usize) -> RequestEncoder<'t> {
        RequestEncoder { tokenizer, max_tokens, last: None }
    }

    /// As [`encode`].
    pub(super) fn encode(&mut self, request: &Request) -> Result<EncodedRequest> {
        match request.context.is_empty() {
            true => self.without_context(&request.continuation),
            false => self.after_context(request),
        }
    }

    /// Encodes the text before an answer that is to be generated: its last tokens, at most `max_tokens`.
    /// White space at its end stays.
    pub(super) fn prompt(&self, context: &str) -> Result<EncodedPrompt> {
        let mut tokens = self.begun(context)?;
        if tokens.is_empty() {
            tokens.push(self.tokenizer.prefix_token());
        }
        let truncated = tokens.len().saturating_sub(self.max_tokens);
        tokens.drain(..truncated);
        Ok(EncodedPrompt { tokens, truncated })
    }

    fn without_context(&self, continuation: &str) -> Result<EncodedRequest> {
        let prefix = self.tokenizer.prefix_token();
        let own = self.tokenizer.encode_with_special(continuation)?;
        let (context, rest) = match own.split_first() {
            Some((first, rest)) if *first == prefix => (prefix, rest),
            _ => (prefix, own.as_slice()),
        };
        self.joined(continuation, &[context], rest, own.len())
    }

    fn after_context(&mut self, request: &Request) -> Result<EncodedRequest> {
        let Request { context, continuation, .. } = request;
        let whole = self.begun(&[context, continuation.as_str()].concat())?;
        if self.last.as_ref().is_none_or(|(last, _)| last != context) {
            let tokens = self.begun(split_end(context).0)?;
            self.last = Some((Arc::clone(context), tokens));
        }
        let before = self.last.as_ref().map_or(&[][..], |(_, tokens)| tokens);
        if before.is_empty() {
            let problem = format!(
                "the context {} has no token before its trailing white space, and the continuation {} has {}",
                shown(context),
                shown(continuation),
                whole.len()
            );
            return Err(DataError::invalid(problem, "give the context some text, or leave it empty"));
        }
        let own = whole.get(before.len()..).unwrap_or_default();
        self.joined(continuation, before, own, whole.len())
    }

    /// Encodes a text after the tokens of the tokenizer's template.
    fn begun(&self, text: &str) -> Result<Vec<u32>> {
        let tokens = self.tokenizer.encode_with_special(text)?;
        let begin = self.tokenizer.document_begin();
        if begin.is_empty() {
            return Ok(tokens);
        }
        let prefix = self.tokenizer.decode(&[self.tokenizer.prefix_token()], SpecialTokens::Show)?;
        match text.starts_with(&prefix) {
            true => Ok(tokens),
            false => Ok([begin, &tokens].concat()),
        }
    }

    fn joined(
        &self,
        continuation: &str,
        context: &[u32],
        own: &[u32],
        together: usize,
    ) -> Result<EncodedRequest> {
        let max = self.max_tokens;
        if own.is_empty() {
            let problem = format!(
                "the continuation {} has no token of its own: the context has {}, and both together have {together}",
                shown(continuation),
                context.len()
            );
            let advice = "lengthen it, or begin it with a delimiter that is a token";
            return Err(DataError::invalid(problem, advice));
        }
        if own.len() > max {
            let problem = format!(
                "the continuation {} has {} tokens, after {} of the context, and the model reads {max}",
                shown(continuation),
                own.len(),
                context.len()
            );
            return Err(DataError::invalid(problem, "shorten it, or take a model with a longer context"));
        }
        let truncated = (context.len() + own.len()).saturating_sub(max + 1);
        let tokens = [&context[truncated..], own].concat();
        Ok(EncodedRequest { tokens, scored: own.len(), truncated })
    }
}
