'use strict';
// What one player knows of a battle, from the lines and requests that the simulator sends to that player.
// The protocol: SIM-PROTOCOL.md of pokemon-showdown.

// Actions: 0-3 moves, 4-7 the same moves with terastallization, 8-13 switches to Pokémon of the team.
const STATUSES = ['brn', 'par', 'slp', 'frz', 'psn', 'tox'];
const STATS = ['atk', 'def', 'spa', 'spd', 'spe'];
const BOOSTS = [...STATS, 'accuracy', 'evasion'];
const TYPES = ['Normal', 'Fire', 'Water', 'Electric', 'Grass', 'Ice', 'Fighting', 'Poison', 'Ground', 'Flying', 'Psychic',
  'Bug', 'Rock', 'Ghost', 'Dragon', 'Dark', 'Steel', 'Fairy'];
const VOLATILES = ['substitute', 'confusion', 'leechseed', 'taunt', 'encore', 'yawn', 'partiallytrapped', 'mustrecharge',
  'reflect', 'lightscreen'];
const CONDITIONS = {stealthrock: 1, spikes: 3, toxicspikes: 2, stickyweb: 1, reflect: 1, lightscreen: 1, auroraveil: 1,
  tailwind: 1, safeguard: 1}; // most layers of each
const WEATHERS = [['sunnyday', 'desolateland'], ['raindance', 'primordialsea'], ['sandstorm'], ['snowscape', 'snow', 'hail']];
const TERRAINS = ['electricterrain', 'grassyterrain', 'mistyterrain', 'psychicterrain'];
// Ability → type of moves that it makes harmless. If a species has only such abilities, they need not be seen first.
const ABSORBED = {levitate: 'Ground', eartheater: 'Ground', flashfire: 'Fire', wellbakedbody: 'Fire', waterabsorb: 'Water',
  stormdrain: 'Water', dryskin: 'Water', voltabsorb: 'Electric', lightningrod: 'Electric', motordrive: 'Electric',
  sapsipper: 'Grass'};
const TRAPS = ['bind', 'wrap', 'clamp', 'firespin', 'whirlpool', 'sandtomb', 'magmastorm', 'infestation', 'thundercage', 'snaptrap'];

const toID = (text) => `${text}`.toLowerCase().replace(/[^a-z0-9]+/g, '');
const effectOf = (text) => toID(text.replace(/^(move|ability|item): /, ''));
const numberOf = (key, text) => {
  const number = Number(text);
  if (text === undefined || text === '' || !Number.isFinite(number)) throw new Error(`${key}: ${text} is no number`);
  return number;
};

/** What is seen of one side. `pokemon`: by name, in the order in which they appeared. */
class Seen {
  constructor() {
    this.pokemon = new Map();
    this.active = null;
    this.conditions = {};
    this.terastallized = false;
    this.leaves();
  }

  /** Forget all that ends when the active Pokémon leaves. */
  leaves() {
    this.boosts = Object.fromEntries(BOOSTS.map((name) => [name, 0]));
    this.volatiles = new Set();
    if (this.active) Object.assign(this.active, {types: null, copied: null});
  }

  comes(name, details, condition) {
    let one = this.pokemon.get(name);
    if (!one) this.pokemon.set(name, one = {name, hp: 1, most: 100, status: '', moves: new Set(), types: null, copied: null});
    this.active = Object.assign(one, described(details), conditionOf(condition));
  }
}

/** Species, level and tera type of a text such as `Ditto, L85, tera:Fire`. */
function described(details) {
  const [species, ...rest] = details.split(', ');
  const level = rest.find((part) => /^L\d+$/.test(part));
  const tera = rest.find((part) => part.startsWith('tera:'));
  return {species, level: level ? Number(level.slice(1)) : 100, tera: tera ? tera.slice(5) : null};
}

/** Life points and status of a text such as `213/250 par` or `0 fnt`. */
function conditionOf(text) {
  const [hp, status = ''] = text.split(' ');
  if (status === 'fnt' || hp === '0') return {hp: 0, status: ''};
  const [now, most] = hp.split('/').map(Number);
  if (!(now >= 0) || !(most > 0)) throw new Error(`condition ${text}`);
  return {hp: now / most, most, status};
}

class View {
  /** `dex`: the simulator's data of the generation; `me`: p1 or p2. */
  constructor(dex, me) {
    this.dex = dex;
    this.me = me;
    this.sides = {p1: new Seen(), p2: new Seen()};
    this.mine = this.sides[me];
    this.theirs = this.sides[me === 'p1' ? 'p2' : 'p1'];
    this.turn = 0;
    this.field = new Set();
    this.weather = '';
    this.request = null;
    this.team = []; // own Pokémon by name, in the order of the first request; switches reorder later requests
    this.moves = new Map(); // own Pokémon → its moves in the first request
    this.choices = new Map(); // legal action → text for the simulator
  }

  /** Process lines that the simulator sent to this player. */
  hear(lines) {
    for (const line of lines) {
      const [, kind, ...words] = line.split('|');
      if (kind) this.event(kind, words);
    }
  }

  event(kind, words) {
    const [where = '', what = '', more = ''] = words;
    const at = /^(p[12])[a-c]?: (.*)$/.exec(where);
    const side = at ? this.sides[at[1]] : null;
    const one = side ? side.pokemon.get(at[2]) : null;
    switch (kind) {
    case 'turn': this.turn = numberOf(kind, where); break;
    case 'switch': case 'drag':
      if (!words.includes('[from] Baton Pass')) side.leaves();
      if (words.includes('[from] Shed Tail')) side.volatiles.add('substitute');
      side.comes(at[2], what, more);
      break;
    case 'replace': // an illusion ends; boosts stay
      side.comes(at[2], what, more || `${Math.round(side.active.hp * 100)}/100 ${side.active.status}`);
      break;
    case 'detailschange': case '-formechange': if (one) Object.assign(one, {species: described(what).species}); break;
    case '-terastallize':
      side.terastallized = true;
      if (one) one.tera = what;
      break;
    case 'move': // moves called by other moves are not the Pokémon's own
      if (one && !words.some((word) => word.startsWith('[from]')) && !one.copied) one.moves.add(toID(what));
      if (side) side.volatiles.delete('mustrecharge');
      break;
    case 'cant': if (side) side.volatiles.delete('mustrecharge'); break;
    case 'faint': if (one) Object.assign(one, {hp: 0, status: ''}); break;
    case '-damage': case '-heal': case '-sethp': if (one) Object.assign(one, conditionOf(what)); break;
    case '-status': if (one) one.status = what; break;
    case '-curestatus': if (one) one.status = ''; break;
    case '-cureteam': for (const other of side.pokemon.values()) other.status = ''; break;
    case '-boost': side.boosts[what] = Math.min(6, side.boosts[what] + numberOf(kind, more)); break;
    case '-unboost': side.boosts[what] = Math.max(-6, side.boosts[what] - numberOf(kind, more)); break;
    case '-setboost': side.boosts[what] = numberOf(kind, more); break;
    case '-swapboost': case '-copyboost': {
      const from = this.sides[what.slice(0, 2)];
      for (const name of more && !more.startsWith('[') ? more.split(', ') : BOOSTS) {
        const before = side.boosts[name];
        side.boosts[name] = from.boosts[name];
        if (kind === '-swapboost') from.boosts[name] = before;
      }
      break;
    }
    case '-invertboost': for (const name of BOOSTS) side.boosts[name] = -side.boosts[name] || 0; break;
    case '-clearboost': this.cleared([side], () => true); break;
    case '-clearallboost': this.cleared([this.mine, this.theirs], () => true); break;
    case '-clearpositiveboost': this.cleared([side], (value) => value > 0); break;
    case '-clearnegativeboost': this.cleared([side], (value) => value < 0); break;
    case '-weather': this.weather = effectOf(where); break;
    case '-fieldstart': this.field.add(effectOf(where)); break;
    case '-fieldend': this.field.delete(effectOf(where)); break;
    case '-sidestart': {
      const conditions = this.sides[where.slice(0, 2)].conditions, name = effectOf(what);
      conditions[name] = Math.min((conditions[name] || 0) + 1, CONDITIONS[name] || 1);
      break;
    }
    case '-sideend': delete this.sides[where.slice(0, 2)].conditions[effectOf(what)]; break;
    case '-swapsideconditions':
      [this.mine.conditions, this.theirs.conditions] = [this.theirs.conditions, this.mine.conditions];
      break;
    case '-start':
      if (effectOf(what) === 'typechange' && one && !more.startsWith('[')) one.types = more.split('/');
      else side.volatiles.add(effectOf(what));
      break;
    case '-activate': if (side && TRAPS.includes(effectOf(what))) side.volatiles.add('partiallytrapped'); break;
    case '-end': side.volatiles.delete(TRAPS.includes(effectOf(what)) ? 'partiallytrapped' : effectOf(what)); break;
    case '-mustrecharge': side.volatiles.add('mustrecharge'); break;
    case '-transform': {
      const other = this.sides[what.slice(0, 2)];
      Object.assign(one, {copied: other.active});
      side.boosts = {...other.boosts};
      break;
    }
    }
  }

  cleared(sides, which) {
    for (const side of sides) for (const name of BOOSTS) if (which(side.boosts[name])) side.boosts[name] = 0;
  }

  /** Process a request to this player. A server sends it before the turn's lines, `sim.Battle` after them. */
  asked(request) {
    this.request = request;
    for (const {ident, moves} of request.side.pokemon) {
      if (this.moves.has(ident)) continue;
      this.team.push(ident);
      this.moves.set(ident, moves);
    }
    this.choices = request.wait ? new Map() : this.possible(request);
  }

  possible({active, forceSwitch, side: {pokemon}}) {
    const choices = new Map();
    const [{moves = [], trapped, canTerastallize} = {}] = active || [];
    const slots = moves.map(({id}) => this.slotOf(pokemon[0].ident, id));
    moves.forEach(({disabled}, index) => {
      if (disabled) return;
      const slot = slots.includes(-1) ? index : slots[index]; // with unknown moves: all in the request's order
      choices.set(slot, `move ${index + 1}`);
      if (canTerastallize) choices.set(4 + slot, `move ${index + 1} terastallize`);
    });
    const reviving = forceSwitch && pokemon[0].reviving; // then only fainted Pokémon can be chosen
    pokemon.forEach(({ident, condition, active: here}, index) => {
      if (!here && !trapped && condition.endsWith(' fnt') === !!reviving) {
        choices.set(8 + this.team.indexOf(ident), `switch ${index + 1}`);
      }
    });
    return choices.size ? choices : new Map([[0, 'default']]);
  }

  /** Index of a move among a Pokémon's first moves, or -1. Some ids end with the move's power or type. */
  slotOf(ident, id) {
    const powered = /^(hiddenpower|return|frustration)/.exec(id);
    return this.moves.get(ident).findIndex((name) => name === id || (powered && name.startsWith(powered[0])));
  }

  /** The simulator refused `action`: it is no longer legal. */
  refused(action) {
    this.choices.delete(action);
    if (!this.choices.size) this.choices.set(0, 'default');
  }

  legal() {
    return [...this.choices.keys()].sort((a, b) => a - b);
  }

  /** Types, stats and so on of a Pokémon, estimated from its species and level and from what was seen. */
  about(one) {
    const known = one.copied ? {...one.copied, hp: one.hp, most: one.most, status: one.status} : one;
    const species = this.dex.species.get(known.species), old = this.dex.gen < 3;
    const stat = (base, plus) => Math.floor(((old ? 2 * (base + 15) + 63 : 2 * base + 52) * known.level) / 100) + plus;
    const stats = Object.fromEntries(STATS.map((name) => [name, stat(species.baseStats[name], 5)]));
    const immune = Object.values(species.abilities || {}).map((name) => ABSORBED[toID(name)]);
    return {
      stats, level: known.level, hp: known.hp, status: known.status, most: stat(species.baseStats.hp, known.level + 10),
      born: species.types, types: known.tera && known.tera !== 'Stellar' ? [known.tera] : known.types || species.types,
      absorbs: this.dex.gen >= 3 ? immune : [], moves: [...one.moves],
    };
  }

  /** As `about`, with the exact values that the request has for an own Pokémon. */
  own(entry) {
    const seen = this.mine.pokemon.get(entry.ident.replace(/^p[12]: /, ''));
    const told = {...described(entry.details), moves: new Set(entry.moves)};
    const one = {copied: null, types: null, ...seen, ...told, ...conditionOf(entry.condition)};
    const about = this.about({...one, tera: entry.terastallized || null});
    const absorbs = this.dex.gen >= 3 ? [ABSORBED[toID(entry.ability || entry.baseAbility)]] : [];
    const stats = one.copied ? about.stats : entry.stats;
    return {...about, absorbs, stats, most: one.most || about.most, moves: entry.moves, tera: !!entry.terastallized};
  }

  /** The factor on damage of moves of `type` to a Pokémon: 0 to 4. */
  effect(type, to) {
    if (type === '???' || !TYPES.includes(type)) return 1;
    const types = to.types.filter((name) => TYPES.includes(name));
    if (!this.dex.getImmunity(type, types)) return 0;
    const share = to.absorbs.length ? to.absorbs.filter((name) => name === type).length / to.absorbs.length : 0;
    return (1 - share) * 2 ** this.dex.getEffectiveness(type, types);
  }

  /** The expected damage of a move, as a share of all life points of the Pokémon `to`. */
  damage(move, from, to, boosts, against, tera = null) {
    if (!move.exists || move.category === 'Status') return 0; // no real move, such as `recharge`
    const accuracy = move.accuracy === true ? 1 : move.accuracy / 100;
    const type = move.id === 'terablast' && tera ? tera : move.type, effect = this.effect(type, to);
    if (move.damage) return effect && (accuracy * (move.damage === 'level' ? from.level : move.damage)) / to.most;
    if (move.ohko) return effect && accuracy;
    const hits = Array.isArray(move.multihit) ? 3 : move.multihit || 1;
    const power = (move.basePower || 60) * hits; // 60: assumed for moves of variable power
    const [attack, defence] = move.category === 'Special' ? ['spa', 'spd'] : ['atk', 'def'];
    const strength = (from.stats[attack] * raised(boosts[attack])) / (to.stats[defence] * raised(against[defence]));
    const born = from.born.includes(type), now = tera ? tera === type : from.types.includes(type);
    const same = born && tera && now ? 2 : born || now ? 1.5 : 1;
    const burnt = from.status === 'brn' && move.category === 'Physical' ? 0.5 : 1;
    const most = (((2 * from.level) / 5 + 2) * power * strength) / 50 + 2;
    return (accuracy * most * same * effect * burnt * 0.925) / to.most; // 0.925: mean of the random factor
  }

  /** Action → expected damage to the opponent's active Pokémon, for each legal move. */
  expected() {
    const found = new Map(), [active] = this.request.active || [];
    if (!active || !this.theirs.active) return found;
    const from = this.own(this.request.side.pokemon[0]), to = this.about(this.theirs.active);
    for (const [action, text] of this.choices) {
      const told = /^move (\d)( terastallize)?$/.exec(text);
      if (!told) continue;
      const move = this.dex.moves.get(active.moves[told[1] - 1].id), tera = told[2] ? active.canTerastallize : null;
      found.set(action, this.damage(move, from, to, this.mine.boosts, this.theirs.boosts, tera));
    }
    return found;
  }
}

/** The lines for one player. After `|split|p1` comes a line for p1 alone, then the same event for everybody else. */
function told(lines, me) {
  const found = [];
  for (let at = 0; at < lines.length; at++) {
    if (!lines[at].startsWith('|split|')) {
      found.push(lines[at]);
    } else {
      found.push(lines[at] === `|split|${me}` ? lines[at + 1] : lines[at + 2]);
      at += 2;
    }
  }
  return found;
}

/** Give each view the part of a battle's output that is for its player. Returns the text of an error, or ''. */
function tell(views, kind, data) {
  const lines = Array.isArray(data) ? data : data.split('\n');
  if (kind === 'update') for (const view of Object.values(views)) view.hear(told(lines, view.me));
  if (kind !== 'sideupdate') return '';
  const [side, line] = lines;
  if (line.startsWith('|request|')) views[side].asked(JSON.parse(line.slice(9)));
  return line.startsWith('|error|') ? line.slice(7) : '';
}

const raised = (boost) => (boost >= 0 ? (2 + boost) / 2 : 2 / (2 - boost));

module.exports = {BOOSTS, CONDITIONS, STATUSES, STATS, TERRAINS, TYPES, VOLATILES, View, WEATHERS, tell, told};
