'use strict';
// Random battles of Pokémon Showdown for other programs, over TCP: `node battles.js --port N`, from a folder where
// `npm install pokemon-showdown@0.11.11` was run. One battle at a time per connection, in lines of JSON (→ in, ← out):
//
//   → {"hello": 1}                                                     ← {"hello": "0.11.11", "size": S}
//   → {"new": 1, "seed": [a, b, c, d], "generation": 9, "opponent": "random"}
//   ← {"ask": 7, "view": base64 of S floats, "legal": [0, 2, 8], "lead": 0.1, "theirs": false}    the 7th decision
//   → {"answer": 7, "action": 2}
//   ← {"refused": 7, "legal": [0, 8], "said": "…"}     the action was not possible: the decision must be made again
//   ← {"over": 1, "view": …, "turns": 31, "left": [2, 0], "log": [...]}
//        over: 1 won, -1 lost, 0 tie; left: Pokémon left on both sides; log: input that replays the battle
//   ← {"error": "…"}                           an error ended the battle
//
// The simulator is called as a library, not by lines of text, so that no text from outside can reach its `>eval`.

const net = require('net');
const path = require('path');
const {createRequire} = require('module');
const {View, tell} = require('./view.js');
const {SIZE, lead, numbers} = require('./numbers.js');

const OPPONENTS = ['random', 'max_damage', 'self'], GENERATIONS = [1, 2, 3, 4, 5, 9];
const VERSION = '0.11.11', LONGEST = 65536; // most characters of a line

/** The simulator, from the working directory, a folder above it or NODE_PATH. Without it: prints an error and exits. */
function simulator() {
  const inFolder = createRequire(path.join(process.cwd(), 'any.js'));
  const found = (name) => {
    try {
      return inFolder(name);
    } catch (error) {
      if (error.code === 'MODULE_NOT_FOUND') return null;
      throw error;
    }
  };
  const {version} = found('pokemon-showdown/package.json') || {};
  const sim = version === VERSION && found('pokemon-showdown');
  if (sim) return sim;
  const is = version && version !== VERSION ? `is ${version}` : version ? 'is not whole' : 'is not there';
  process.stderr.write(`pokemon-showdown ${VERSION} is needed, in ${process.cwd()}, above it or in NODE_PATH it ${is}: ` +
    `npm install --omit=optional --ignore-scripts pokemon-showdown@${VERSION}\n`);
  return process.exit(1);
}

/** A random legal action. */
const random = (view, prng) => prng.sample(view.legal());

/** The move with the largest expected damage; a random legal action if there is no move. */
function maxDamage(view, prng) {
  const expected = [...view.expected()].filter(([action]) => action < 4);
  if (!expected.length) return random(view, prng);
  const most = Math.max(...expected.map(([, taken]) => taken));
  return prng.sample(expected.filter(([, taken]) => taken === most).map(([action]) => action));
}

class Game {
  constructor(sim, {seed, generation, opponent}) {
    if (!GENERATIONS.includes(generation)) throw new Error(`generation ${generation} is none of ${GENERATIONS}`);
    if (!OPPONENTS.includes(opponent)) throw new Error(`opponent ${opponent} is none of ${OPPONENTS}`);
    if (!(Array.isArray(seed) && seed.length === 4 && seed.every((word) => Number.isInteger(word) && word >= 0 && word < 65536))) {
      throw new Error('seed: expected four numbers below 65536');
    }
    this.sim = sim;
    this.opponent = opponent;
    this.asks = 0;
    this.said = '';
    const formatid = `gen${generation}randombattle`, dex = sim.Dex.forFormat(formatid);
    this.views = {p1: new View(dex, 'p1'), p2: new View(dex, 'p2')};
    const seeds = new sim.PRNG(seed);
    const another = () => [0, 0, 0, 0].map(() => seeds.random(65536));
    this.dice = new sim.PRNG(another());
    this.battle = new sim.Battle({formatid, seed: another(), send: (kind, data) => this.heard(kind, data)});
    for (const side of ['p1', 'p2']) this.battle.setPlayer(side, {name: side, seed: another().join(',')});
  }

  heard(kind, data) {
    this.said = tell(this.views, kind, data) || this.said;
  }

  /** Play on to the next decision of the caller or to the end; returns the message about it. */
  next() {
    for (;;) {
      this.battle.sendUpdates();
      if (this.battle.ended) return this.over();
      const [first, second] = this.battle.sides;
      if (!first.isChoiceDone()) return this.ask('p1');
      if (second.isChoiceDone()) throw new Error('nobody can decide');
      if (this.opponent === 'self') return this.ask('p2');
      const decide = this.opponent === 'random' ? random : maxDamage;
      while (!this.chosen('p2', decide(this.views.p2, this.dice)));
    }
  }

  ask(side) {
    this.asked = side;
    this.asks += 1;
    const view = this.views[side];
    return {ask: this.asks, view: coded(numbers(view)), legal: view.legal(), lead: lead(this.views.p1), theirs: side === 'p2'};
  }

  /** Try the action; returns whether the simulator accepted it. If not, the action is no longer legal. */
  chosen(side, action) {
    const view = this.views[side], text = view.choices.get(action);
    if (text === undefined) throw new Error(`${action} is none of ${view.legal()}`);
    if (this.battle.choose(side, text)) return true;
    if (text === 'default') throw new Error(`not even default: ${this.said}`);
    view.refused(action);
    return false;
  }

  answer({answer, action}) {
    if (answer !== this.asks) throw new Error(`answer to ${answer}, asked was ${this.asks}`);
    if (this.chosen(this.asked, action)) return this.next();
    return {refused: this.asks, legal: this.views[this.asked].legal(), said: this.said};
  }

  over() {
    const {winner, turn, inputLog} = this.battle;
    const view = this.views.p1;
    return {over: winner === 'p1' ? 1 : winner === 'p2' ? -1 : 0, view: coded(numbers(view)), turns: turn, log: inputLog,
      left: this.battle.sides.map((side) => side.pokemonLeft)};
  }
}

const coded = (floats) => Buffer.from(floats.buffer).toString('base64');

function serve(sim, socket) {
  let game = null, begun = '';
  socket.setNoDelay(true);
  socket.setEncoding('utf8');
  socket.on('error', () => socket.destroy());
  socket.on('data', (text) => {
    const lines = (begun + text).split('\n');
    begun = lines.pop();
    if (begun.length > LONGEST) socket.destroy();
    for (const line of lines) {
      let reply;
      try {
        const message = JSON.parse(line);
        if (message.hello) reply = {hello: VERSION, size: SIZE};
        else if (message.new) reply = (game = new Game(sim, message)).next();
        else if (game) reply = game.answer(message);
        else throw new Error('there is no battle');
      } catch (error) {
        game = null;
        reply = {error: `${error.stack || error}`.slice(0, 2000)};
      }
      socket.write(`${JSON.stringify(reply)}\n`);
    }
  });
}

if (require.main === module) {
  const sim = simulator(), at = process.argv.indexOf('--port');
  net.createServer((socket) => serve(sim, socket)).listen(Number(process.argv[at + 1]), '127.0.0.1', 1024);
}

module.exports = {Game, simulator};
