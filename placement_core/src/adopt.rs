//! From placements that somebody recorded back to tokens, and whether the pool still has their room.

use std::collections::HashMap;

use crate::extras::Extras;
use crate::held::Held;
use crate::lease::Placement;
use crate::shape::{GpuShape, Shape};
use crate::state::{State, Tenant};

/// The first token for which, the ones before it counted, there is no room.
pub(crate) fn first_without_room(
    state: &State,
    shape: Shape,
    extras: &Extras,
    tokens: &[Held],
) -> Option<usize> {
    let mut tried = HashMap::new();
    tokens.iter().position(|token| {
        let (node, node_extras) = tried.entry(token.node()).or_insert_with(|| {
            (state.nodes[token.node() as usize].clone(), state.extras.at(token.node()).cloned())
        });
        let has_extras = match node_extras {
            Some(node_extras) => node_extras.has_room(extras),
            None => extras.fits_empty(None) > 0,
        };
        let has_room = has_extras && shape.has_room_on(node, token.gpus);
        if has_room {
            shape.place_on(node, token.gpus);
            if let Some(node_extras) = node_extras {
                node_extras.take(extras);
            }
        }
        !has_room
    })
}

/// The token that a recorded placement stands for, whether or not its room is free.
pub(crate) fn locate(
    state: &State,
    shape: Shape,
    extras: &Extras,
    placement: &Placement,
) -> Result<Held, String> {
    let node = *state.names.get(&placement.node).ok_or(format!("no node '{}'", placement.node))?;
    let Tenant { supply, info } = &state.tenants[node as usize];
    let labels = &Extras::of(supply.extras.as_ref()).labels;
    if let Some((key, value)) = extras.lacking(labels).next() {
        return Err(format!("'{}' lacks the label {key}={value}", placement.node));
    }
    let mut slots = 0_u64;
    for &id in &placement.gpu_ids {
        let slot = info.slot_of(id).ok_or(format!("no GPU {id} on '{}'", placement.node))?;
        slots |= 1 << slot;
    }
    let expected = match shape.gpu {
        GpuShape::None => 0,
        GpuShape::Share(_) => 1,
        GpuShape::Whole(gpus) => gpus,
    };
    if slots.count_ones() != expected || placement.gpu_ids.len() != expected as usize {
        return Err(format!("has {} GPUs, its demand takes {expected}", placement.gpu_ids.len()));
    }
    Ok(Held::new(node, state.nodes[node as usize].info, shape.gpus(slots)))
}
