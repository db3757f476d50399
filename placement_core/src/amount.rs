//! The one place where the floats that people write become integers, and back for display.
//!
//! Every amount is floored with a slack of a millionth of its unit: right for each thousandth and each 1/n of a GPU
//! (rounding to nearest loses a slot at 1/6, a ceiling one at 1/3). Supply, demand and budget go through the same door.

use crate::error::{AmountFault, PlacementError, Result};

/// One whole GPU in micro-GPU, the unit of every GPU amount inside the crate.
pub const WHOLE_GPU_MICRO: u32 = 1_000_000;

const CPU_UNITS: f64 = 1_000.0;
const MEMORY_UNITS: f64 = 1_024.0;
const SLACK: f64 = 1e-6;
// Above 2^53 a float no longer names every integer.
const LARGEST: f64 = 9_007_199_254_740_992.0;

fn units(field: &'static str, value: f64, per_unit: f64) -> Result<u64> {
    let fail = |fault| Err(PlacementError::InvalidAmount { field, value, fault });
    if !value.is_finite() {
        return fail(AmountFault::NotFinite);
    }
    if value < 0.0 {
        return fail(AmountFault::Negative);
    }
    let scaled = (value * per_unit + SLACK).floor();
    if scaled >= LARGEST {
        return fail(AmountFault::TooLarge);
    }
    if scaled < 1.0 && value > 0.0 {
        return fail(AmountFault::TooSmall);
    }
    // In range and not negative, as checked above.
    #[allow(clippy::cast_sign_loss)]
    let amount = scaled as u64;
    Ok(amount)
}

/// GPUs as micro-GPU.
pub(crate) fn micro_gpu(value: f64) -> Result<u64> {
    units("gpu", value, f64::from(WHOLE_GPU_MICRO))
}

/// CPU cores as milli-cores.
pub(crate) fn milli_cpu(value: f64) -> Result<u64> {
    units("cpu", value, CPU_UNITS)
}

/// GiB as MiB.
pub(crate) fn memory_mib(value: f64) -> Result<u64> {
    units("memory_gb", value, MEMORY_UNITS)
}

/// Micro-GPU as GPUs, for display.
pub(crate) fn gpu_for_display(micro: u64) -> f64 {
    micro as f64 / f64::from(WHOLE_GPU_MICRO)
}

/// Milli-cores as cores, for display.
pub(crate) fn cpu_for_display(milli: u64) -> f64 {
    milli as f64 / CPU_UNITS
}

/// MiB as GiB, for display.
pub(crate) fn memory_for_display(mib: u64) -> f64 {
    mib as f64 / MEMORY_UNITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thousandth_is_exact() {
        for thousandths in 0..=1_000_u32 {
            let written = f64::from(thousandths) / 1_000.0;
            assert_eq!(micro_gpu(written).unwrap(), u64::from(thousandths) * 1_000, "{written}");
        }
    }

    #[test]
    fn every_nth_places_n_to_a_gpu() {
        for n in 1..=1_000_u64 {
            let share = micro_gpu(1.0 / n as f64).unwrap();
            assert_eq!(u64::from(WHOLE_GPU_MICRO) / share, n, "1/{n}");
        }
    }

    #[test]
    fn what_is_no_amount_is_named() {
        let fault = |value| match milli_cpu(value) {
            Err(PlacementError::InvalidAmount { field: "cpu", fault, .. }) => fault,
            other => panic!("{other:?}"),
        };
        assert_eq!(fault(f64::NAN), AmountFault::NotFinite);
        assert_eq!(fault(f64::NEG_INFINITY), AmountFault::NotFinite);
        assert_eq!(fault(-0.5), AmountFault::Negative);
        assert_eq!(fault(1e300), AmountFault::TooLarge);
        assert_eq!(fault(1e-9), AmountFault::TooSmall);
        assert_eq!(milli_cpu(-0.0).unwrap(), 0);
    }

    #[test]
    fn display_inverts_conversion() {
        assert!((gpu_for_display(330_000) - 0.33).abs() < 1e-12);
        assert!((cpu_for_display(1_500) - 1.5).abs() < 1e-12);
        assert!((memory_for_display(1_536) - 1.5).abs() < 1e-12);
    }
}
