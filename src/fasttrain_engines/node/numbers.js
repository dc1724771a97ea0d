'use strict';
// A player's observation, one vector of floats: docs/games/showdown.md lists its parts in order.

const {BOOSTS, CONDITIONS, STATS, STATUSES, TERRAINS, TYPES, VOLATILES, WEATHERS} = require('./view.js');

const TEAM = 6;
const POKEMON = 4 + STATUSES.length + TYPES.length + STATS.length + 7;
const SIDE = BOOSTS.length + VOLATILES.length + Object.keys(CONDITIONS).length + 2;
const MOVE = 19, FIELD = 4 + WEATHERS.length + TERRAINS.length;
const SIZE = (2 * TEAM + 2) * POKEMON + 2 * SIDE + 4 * MOVE + FIELD;
const GUESSED = {exists: true, accuracy: true, basePower: 70}; // assumed move of a Pokémon whose moves are unknown
const SPECIAL = ['Fire', 'Water', 'Electric', 'Grass', 'Ice', 'Psychic', 'Dragon', 'Dark']; // generations 1 to 3
const EFFECTS = [0, 0.25, 0.5, 1, 2, 4];
const LONGEST = 8; // most turns of a duel

/** The number of turns, at most LONGEST, in which hits of size `blow` take `life`. */
const turns = (life, blow) => (blow * LONGEST > life ? Math.ceil(life / blow) : LONGEST);

/** The observation of `view`, a Float32Array (SIZE,). */
function numbers(view) {
  const out = new Float32Array(SIZE), {request, mine, theirs} = view;
  let at = 0;
  const put = (...values) => { for (const value of values) out[at++] = value; };
  const entries = new Map(request.side.pokemon.map((entry) => [entry.ident, entry]));
  const own = view.team.map((ident) => entries.has(ident) && view.own(entries.get(ident)));
  const place = view.team.indexOf(request.side.pokemon[0].ident);
  const active = own[place], other = theirs.active ? view.about(theirs.active) : null;
  const against = [...theirs.pokemon.values()].map((one) => [view.about(one), one]);

  /** Largest expected damage to `to` by a known move of `from`; without known moves, by assumed moves of its types. */
  const most = (from, to, boosts, shields) => {
    if (!from || !to) return 0;
    const known = from.moves.map((name) => view.dex.moves.get(name)).filter((move) => move.category !== 'Status');
    const special = (type) => (view.dex.gen > 3 ? from.stats.spa > from.stats.atk : SPECIAL.includes(type));
    const guessed = (type) => ({...GUESSED, type, category: special(type) ? 'Special' : 'Physical'});
    const blows = known.length ? known : from.types.map(guessed);
    return Math.max(0, ...blows.map((move) => view.damage(move, from, to, boosts, shields)));
  };
  const none = Object.fromEntries(BOOSTS.map((name) => [name, 0]));
  const pokemon = (one, here, tera, foe, mineHere) => {
    if (!one) { at += POKEMON; return; }
    const boosts = here ? (mineHere ? mine.boosts : theirs.boosts) : none;
    const shields = mineHere ? theirs.boosts : mine.boosts;
    put(1, one.hp > 0, here, one.hp);
    for (const status of STATUSES) put(one.status === status);
    for (const type of TYPES) put(one.types.includes(type));
    for (const name of STATS) put(one.stats[name] / 400);
    const given = most(one, foe, boosts, shields), taken = most(foe, one, shields, boosts);
    put(one.most / 500, tera, Math.min(given, 1.5), Math.min(taken, 1.5), one.hp > 0 && taken >= one.hp);
    const faster = !!foe && one.stats.spe > foe.stats.spe;
    // Who would win if neither switched: a small network learns this slowly by itself.
    const ahead = foe ? turns(one.hp, taken) - turns(foe.hp, given) + (faster ? 0.5 : -0.5) : 0;
    put(faster, ahead / LONGEST);
  };
  const side = (one, left, open) => {
    for (const name of BOOSTS) put(one.boosts[name] / 6);
    for (const name of VOLATILES) put(one.volatiles.has(name));
    for (const [name, layers] of Object.entries(CONDITIONS)) put((one.conditions[name] || 0) / layers);
    put(left / 6, open);
  };

  pokemon(active, true, active.tera, other, true);
  pokemon(other, true, !!(theirs.active && theirs.active.tera), active, false);
  for (let index = 0; index < TEAM; index++) pokemon(own[index], index === place, own[index].tera, other, true);
  for (let index = 0; index < TEAM; index++) {
    const [one, seen] = against[index] || [];
    pokemon(one, seen && seen === theirs.active, seen && !!seen.tera, active, false);
  }
  const [moves = {}] = request.active || [];
  side(mine, own.filter((one) => one && one.hp > 0).length, !!moves.canTerastallize);
  side(theirs, TEAM - against.filter(([one]) => !(one.hp > 0)).length, !theirs.terastallized);

  const expected = view.expected();
  const told = moves.moves || [], best = Math.max(0, ...[0, 1, 2, 3].map((slot) => expected.get(slot) || 0));
  for (let slot = 0; slot < 4; slot++) {
    const text = view.choices.get(slot), which = /^move (\d)/.exec(text || '');
    if (!which) { at += MOVE; continue; }
    const {id, pp, maxpp} = told[which[1] - 1], move = view.dex.moves.get(id), begins = at;
    put(1);
    if (!move.exists) { at = begins + MOVE; continue; } // entries that are no real moves, such as `recharge`
    const taken = expected.get(slot) || 0, open = expected.get(4 + slot) || 0;
    const effect = other && move.category !== 'Status' ? view.effect(move.type, other) : 1;
    put(best > 0 && taken === best);
    put(move.basePower / 150, Math.min(taken, 1.5), !!other && taken >= other.hp, Math.min(open, 1.5));
    put(EFFECTS.findIndex((value) => value >= effect) / 5, move.accuracy === true ? 1 : move.accuracy / 100);
    put(move.priority / 5, move.category === 'Physical', move.category === 'Special', move.category === 'Status');
    put(!!(move.heal || move.flags.heal), !!(move.self && move.self.boosts) || (!!move.boosts && move.target === 'self'));
    put(!!move.boosts && move.target !== 'self', !!(move.status || move.volatileStatus && move.target !== 'self'));
    put(!!move.sideCondition, !!move.selfSwitch, maxpp ? pp / maxpp : 1);
  }

  put(Math.min(view.turn, 100) / 100, !!request.forceSwitch, !!moves.trapped, !!moves.maybeTrapped);
  for (const names of WEATHERS) put(names.includes(view.weather));
  for (const name of TERRAINS) put(view.field.has(name));
  if (at !== SIZE) throw new Error(`${at} numbers of ${SIZE}`);
  return out;
}

/** The player's lead: the difference between both teams' shares of life points left, -1 to 1. */
function lead(view) {
  const mine = view.request.side.pokemon.map((entry) => view.own(entry).hp);
  const lost = [...view.theirs.pokemon.values()].map((one) => 1 - one.hp);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  return (sum(mine) + sum(lost)) / 6 - 1;
}

module.exports = {SIZE, lead, numbers};
