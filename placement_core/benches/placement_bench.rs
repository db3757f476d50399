//! Cost of placement.
fn main() {}
