'use strict';
// What both players know after each chunk of recorded traffic, for test_showdown_view.py: `node showdown_views.js VIEW.JS`.
// In: a JSON list of chunks as pokemon-showdown's BattleStream writes them, or "refused p1 9". Out: a list of states.
const {View, tell} = require(process.argv[2]);

const seen = (side) => Object.fromEntries([...side.pokemon].map(([name, {hp, most, status, moves}]) =>
  [name, {hp, most, status, moves: [...moves]}]));
const state = (view) => ({legal: view.legal(), choices: Object.fromEntries(view.choices), team: view.team, turn: view.turn,
  mine: seen(view.mine), theirs: seen(view.theirs), boosts: view.mine.boosts,
  conditions: view.mine.conditions, theirConditions: view.theirs.conditions, theirBoosts: view.theirs.boosts, weather: view.weather});

const views = {p1: new View(null, 'p1'), p2: new View(null, 'p2')};
const states = JSON.parse(require('fs').readFileSync(0, 'utf8')).map((chunk) => {
  const [kind, ...lines] = chunk.split('\n'), [, side, action] = chunk.split(' ');
  let said = '';
  if (kind.startsWith('refused ')) views[side].refused(Number(action));
  else said = tell(views, kind, lines);
  return {said, p1: state(views.p1), p2: state(views.p2)};
});
process.stdout.write(JSON.stringify(states));
