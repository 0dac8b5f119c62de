//! The algorithms that `XTRAIN_PREFER` names, separated by commas.

/// The algorithms that `XTRAIN_PREFER` names, in order of preference.
pub fn preferred_algorithms() -> Vec<String> {
    let named = std::env::var("XTRAIN_PREFER").unwrap_or_default();
    named.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
