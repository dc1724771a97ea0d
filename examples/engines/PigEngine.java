import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.math.BigInteger;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.StandardProtocolFamily;
import java.net.StandardSocketOptions;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ReadableByteChannel;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.channels.WritableByteChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.LockSupport;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The twin of pig_engine.py, which says what the game, the protocol, the switches and the faults are. It plays the same
 * games, and at `--think-ms 0` sends the same bytes for the same seeds. One thread a connection.
 *
 *     javac -d classes PigEngine.java && java -cp classes PigEngine --port 20000
 */
public final class PigEngine {
    static final int LIMIT = 1 << 20;
    static final String MESSAGES = "ping, new, choose, reset, step";
    static final List<String> KINDS = List.of("crash", "hang", "stop", "oom", "slow", "garbage", "mutate", "truncate",
        "deep", "reorder", "oversize", "wrong_game", "half_close", "close", "refuse", "illegal_mask", "nan",
        "wrong_shape");

    // ---- switches

    static final Map<String, String> given = new LinkedHashMap<>(Map.ofEntries(
        Map.entry("port", ""), Map.entry("socket", ""), Map.entry("framing", "lines"), Map.entry("codec", "json"),
        Map.entry("goal", "50"), Map.entry("think-ms", "0"), Map.entry("think", "constant"),
        Map.entry("spread", "0.63"), Map.entry("think-seed", "0"), Map.entry("max-connections", "2147483647"),
        Map.entry("start-delay-s", "0"), Map.entry("leak-mb-per-game", "0"), Map.entry("fault-seed", "0")));
    static final List<String> flags = new ArrayList<>();
    static final List<String> faultKinds = new ArrayList<>();
    static final List<Double> faultProbabilities = new ArrayList<>();
    static boolean lines, lognormal, compute, notes, logs;
    static long goal, thinkSeed, faultSeed, maxConnections;
    static double thinkMs, spread, leakMb;

    static final AtomicInteger open = new AtomicInteger();
    static final List<byte[]> kept = new ArrayList<>();

    static RuntimeException fail(String why) {
        System.err.println("PigEngine: " + why);
        System.exit(2);
        return new IllegalStateException(why);
    }

    static double number(String name, double least) {
        try {
            String text = given.get(name);
            double value = text.equals("inf") ? Double.POSITIVE_INFINITY : Double.parseDouble(text);
            if (value >= least && (Double.isFinite(value) || name.equals("start-delay-s"))) return value;
            throw fail("--" + name + " " + text + ": must be at least " + (long) least + " and finite");
        } catch (NumberFormatException error) {
            throw fail("--" + name + " " + given.get(name) + ": not a number");
        }
    }

    static long whole(String name, long least) {
        try {
            long value = Long.parseLong(given.get(name));
            if (value >= least) return value;
            throw fail("--" + name + " " + value + ": must be at least " + least);
        } catch (NumberFormatException error) {
            throw fail("--" + name + " " + given.get(name) + ": not a whole number");
        }
    }

    static boolean choice(String name, String first, String second) {
        if (List.of(first, second).contains(given.get(name))) return given.get(name).equals(first);
        throw fail("--" + name + " " + given.get(name) + ": must be " + first + " or " + second);
    }

    static void fault(String text) {
        String[] parts = text.split("=", 2);
        double probability = -1;
        try {
            probability = parts.length == 2 ? Double.parseDouble(parts[1]) : -1;
        } catch (NumberFormatException error) {
            // said below, with the rest
        }
        if (!KINDS.contains(parts[0]) || !(probability >= 0 && probability <= 1))
            throw fail("--fault " + text + ": must be KIND=PROBABILITY, the kind one of " + String.join(", ", KINDS));
        faultKinds.add(parts[0]);
        faultProbabilities.add(probability);
    }

    static void readSwitches(String[] args) {
        for (int i = 0; i < args.length; i++) {
            int equals = args[i].indexOf('=');
            String name = equals < 0 ? args[i] : args[i].substring(0, equals);
            if (List.of("--stdio", "--notes", "--compute", "--log").contains(args[i])) {
                flags.add(name);
                continue;
            }
            boolean known = name.startsWith("--") && (given.containsKey(name.substring(2)) || name.equals("--fault"));
            if (!known) throw fail("unknown switch " + args[i] + "; pig_engine.py --help lists them");
            if (equals < 0 && i + 1 == args.length) throw fail(name + " needs a value");
            String value = equals < 0 ? args[++i] : args[i].substring(equals + 1);
            if (name.equals("--fault")) fault(value);
            else given.put(name.substring(2), value);
        }
        int places = (given.get("port").isEmpty() ? 0 : 1) + (given.get("socket").isEmpty() ? 0 : 1);
        if (places + (flags.contains("--stdio") ? 1 : 0) != 1) throw fail("say one of --port, --socket, --stdio");
        if (!choice("codec", "json", "msgpack"))
            throw fail("--codec msgpack: not in Java, which has no reader of it; pig_engine.py has");
        lines = choice("framing", "lines", "length");
        lognormal = choice("think", "lognormal", "constant");
        compute = flags.contains("--compute");
        notes = flags.contains("--notes");
        logs = flags.contains("--log");
        goal = whole("goal", 1);
        thinkSeed = whole("think-seed", Long.MIN_VALUE);
        faultSeed = whole("fault-seed", Long.MIN_VALUE);
        maxConnections = whole("max-connections", 1);
        thinkMs = number("think-ms", 0);
        spread = number("spread", 0);
        leakMb = number("leak-mb-per-game", 0);
    }

    // ---- the game

    /** SplitMix64: a few lines in any language, and the same numbers in each. */
    static final class Draws {
        long at;

        Draws(long seed) { at = seed; }

        long next() {
            long x = at += 0x9E3779B97F4A7C15L;
            x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L;
            x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL;
            return x ^ (x >>> 31);
        }

        int below(int n) { return (int) ((next() >>> 33) % n); }

        double unit() { return (next() >>> 11) * 0x1p-53; }
    }

    /** One game, from the agent's side. Between its calls the agent is to move or the game is over. */
    static final class Pig {
        final Draws draws;
        final List<String> rolls = new ArrayList<>();
        long mine, theirs, turn;
        int dice;
        boolean over;
        double reward;

        Pig(long seed) {
            draws = new Draws(seed);
            if ((seed & 1) == 1) opponent();
        }

        List<Object> state() { return List.of(mine, theirs, turn); }

        List<Object> legal() { return over ? List.of() : turn > 0 ? List.of(0L, 1L) : List.of(0L); }

        void act(long action) {
            rolls.clear();
            if (action == 1) {
                mine += turn;
                turn = 0;
                if (mine >= goal) end(1);
            }
            if (!over && (action == 1 || !thrown("you"))) opponent();
        }

        void opponent() {
            while (!over) {
                if (turn > 0 && (turn >= 20 || theirs + turn >= goal)) {
                    theirs += turn;
                    turn = 0;
                    if (theirs >= goal) end(-1);
                    return;
                }
                if (!thrown("the engine")) return;
            }
        }

        /** Throws the die; whether the turn goes on. */
        boolean thrown(String who) {
            int die = 1 + draws.below(6);
            if (notes) rolls.add(who + " rolled " + die);
            turn = die == 1 ? 0 : turn + die;
            over = ++dice == 1000;
            return die != 1;
        }

        void end(double reward) {
            over = true;
            this.reward = reward;
        }
    }

    // ---- JSON: whole numbers are Long, or BigInteger beyond 64 bits

    static Map<String, Object> message(Object... pairs) {
        Map<String, Object> message = new LinkedHashMap<>();
        for (int i = 0; i < pairs.length; i += 2) message.put((String) pairs[i], pairs[i + 1]);
        return message;
    }

    static byte[] encode(Object value) {
        StringBuilder out = new StringBuilder(128);
        write(out, value);
        return out.toString().getBytes(StandardCharsets.US_ASCII);
    }

    static void write(StringBuilder out, Object value) {
        if (value instanceof Map<?, ?> map) {
            String separator = "{";
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                write(out.append(separator), entry.getKey());
                write(out.append(':'), entry.getValue());
                separator = ",";
            }
            out.append(map.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            out.append('[');
            for (int i = 0; i < list.size(); i++) write(i > 0 ? out.append(',') : out, list.get(i));
            out.append(']');
        } else if (value instanceof String text) {
            out.append('"');
            for (int i = 0; i < text.length(); i++) {
                char c = text.charAt(i);
                int named = "\"\\\n\r\t\f\b".indexOf(c);
                if (named >= 0) out.append('\\').append("\"\\nrtfb".charAt(named));
                else if (c >= ' ' && c <= '~') out.append(c);
                else out.append(String.format("\\u%04x", (int) c));
            }
            out.append('"');
        } else {
            out.append(value); // Long, BigInteger, Double, Boolean, null; a double NaN comes as a bare NaN
        }
    }

    /** A strict reader: any IllegalArgumentException means that the text is no JSON. */
    static final class Reader {
        static final Pattern NUMBER = Pattern.compile("-?(?:0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?");
        final String text;
        int at;

        Reader(String text) { this.text = text; }

        static Object read(byte[] payload) {
            try {
                ByteBuffer bytes = ByteBuffer.wrap(payload);
                Reader reader = new Reader(StandardCharsets.UTF_8.newDecoder().decode(bytes).toString());
                Object value = reader.value(0);
                reader.skip();
                if (reader.at < reader.text.length()) throw new IllegalArgumentException("something follows");
                return value;
            } catch (java.nio.charset.CharacterCodingException error) {
                throw new IllegalArgumentException(error);
            }
        }

        void skip() {
            while (at < text.length() && " \t\n\r".indexOf(text.charAt(at)) >= 0) at++;
        }

        boolean took(String wanted) {
            skip();
            boolean there = text.startsWith(wanted, at);
            if (there) at += wanted.length();
            return there;
        }

        void take(String wanted) {
            if (!took(wanted)) throw new IllegalArgumentException(wanted + " is missing");
        }

        Object value(int depth) {
            if (depth > 500) throw new IllegalArgumentException("nested too deep"); // recursion costs stack
            if (took("{")) {
                Map<String, Object> map = new LinkedHashMap<>();
                if (took("}")) return map;
                do {
                    take("\"");
                    String key = string();
                    take(":");
                    map.put(key, value(depth + 1));
                } while (took(","));
                take("}");
                return map;
            }
            if (took("[")) {
                List<Object> list = new ArrayList<>();
                if (took("]")) return list;
                do list.add(value(depth + 1)); while (took(","));
                take("]");
                return list;
            }
            if (took("\"")) return string();
            if (took("true")) return true;
            if (took("false")) return false;
            if (took("null")) return null;
            return number();
        }

        String string() {
            StringBuilder out = new StringBuilder();
            for (char c = next(); c != '"'; c = next()) {
                if (c < ' ') throw new IllegalArgumentException("a control character");
                if (c != '\\') {
                    out.append(c);
                    continue;
                }
                c = next();
                int named = "\"\\/nrtfb".indexOf(c);
                if (named >= 0) out.append("\"\\/\n\r\t\f\b".charAt(named));
                if (named >= 0) continue;
                if (c != 'u') throw new IllegalArgumentException("an unknown escape");
                int code = 0;
                for (int i = 0; i < 4; i++) {
                    int digit = Character.digit(next(), 16);
                    if (digit < 0) throw new IllegalArgumentException("no hexadecimal digit");
                    code = code * 16 + digit;
                }
                out.append((char) code);
            }
            return out.toString();
        }

        char next() {
            if (at >= text.length()) throw new IllegalArgumentException("it ends early");
            return text.charAt(at++);
        }

        Object number() {
            Matcher number = NUMBER.matcher(text).region(at, text.length());
            if (!number.lookingAt()) throw new IllegalArgumentException("no value");
            at = number.end();
            if (number.group(1) != null || number.group(2) != null) return Double.parseDouble(number.group());
            BigInteger whole = new BigInteger(number.group());
            return whole.bitLength() < 64 ? (Object) whole.longValue() : whole;
        }
    }

    // ---- a connection

    static final class Connection implements Runnable {
        final int number;
        final ReadableByteChannel in;
        final WritableByteChannel out;
        final ByteBuffer got = ByteBuffer.allocateDirect(1 << 16).flip();
        final Draws thinking, faults;
        Pig pig;
        boolean asks, refuses; // asks: decision mode
        long game, id;
        List<Object> legal = List.of(); // of the decision that is open
        byte[] held, previous = new byte[0];

        Connection(int number, ReadableByteChannel in, WritableByteChannel out) {
            this.number = number;
            this.in = in;
            this.out = out;
            thinking = new Draws(thinkSeed + number);
            faults = new Draws(faultSeed + number);
        }

        @Override
        public void run() {
            try {
                for (byte[] payload = read(); payload != null; payload = read()) {
                    log("<-", payload);
                    Object message = null;
                    try {
                        message = Reader.read(payload);
                    } catch (IllegalArgumentException error) {
                        send(message("type", "error", "why", "the message is not json"));
                        continue;
                    }
                    handle(message);
                }
            } catch (IOException error) {
                // the peer went, its framing is broken, or a fault closes
            } catch (OutOfMemoryError error) {
                Runtime.getRuntime().halt(3); // as -XX:+ExitOnOutOfMemoryError does
            }
            open.decrementAndGet();
            try {
                in.close();
                out.close();
            } catch (IOException error) {
                // closed it is
            }
        }

        int next() throws IOException {
            if (!got.hasRemaining()) {
                int count = in.read(got.clear());
                got.flip();
                if (count < 0) return -1;
            }
            return got.get() & 0xff;
        }

        /** The next payload; null at the end, and where the framing is broken. */
        byte[] read() throws IOException {
            ByteArrayOutputStream payload = new ByteArrayOutputStream(128);
            long size = 0;
            for (int i = 0; i < 4 && !lines; i++) {
                int next = next();
                if (next < 0) return null;
                size = size << 8 | next;
            }
            if (size > LIMIT) return null;
            while (lines || payload.size() < size) {
                int next = next();
                if (lines && next == '\n') break;
                if (next < 0 || payload.size() == LIMIT) return null;
                payload.write(next);
            }
            return payload.toByteArray();
        }

        static byte[] framed(byte[] payload) {
            int size = payload.length;
            ByteBuffer frame = ByteBuffer.allocate(size + (lines ? 1 : 4));
            return (lines ? frame.put(payload).put((byte) '\n') : frame.putInt(size).put(payload)).array();
        }

        void send(Map<String, Object> message) throws IOException {
            byte[] payload = encode(message);
            log("->", payload);
            write(framed(payload));
        }

        synchronized void write(byte[] frame) throws IOException {
            byte[] then = held;
            held = null;
            for (ByteBuffer left = ByteBuffer.wrap(frame); left.hasRemaining();) out.write(left);
            if (then != null) write(then);
        }

        void log(String arrow, byte[] payload) {
            if (!logs) return;
            int size = Math.min(300, payload.length);
            System.err.println(number + " " + arrow + " " + new String(payload, 0, size, StandardCharsets.UTF_8));
        }

        void handle(Object received) throws IOException {
            Map<?, ?> message = received instanceof Map<?, ?> map ? map : Map.of();
            String type = message.get("type") instanceof String text ? text : "";
            List<String> needs = switch (type) {
                case "ping" -> List.of();
                case "new" -> List.of("game", "seed");
                case "choose" -> List.of("game", "id", "action");
                case "reset" -> List.of("id", "seed");
                case "step" -> List.of("id", "action");
                default -> null;
            };
            if (needs == null) {
                send(message("type", "error", "why", "a message is an object whose type is one of " + MESSAGES));
                return;
            }
            for (String key : needs) {
                if (message.containsKey(key)) continue;
                send(message("type", "error", "why", type + " needs " + String.join(", ", needs)));
                return;
            }
            if (type.equals("ping")) send(message("type", "pong"));
            else if (type.equals("new") || type.equals("reset")) begin(message, type.equals("new"));
            else act(message, type.equals("choose"));
        }

        void begin(Map<?, ?> message, boolean asks) throws IOException {
            if (!(message.get("seed") instanceof Long seed) || asks && !(message.get("game") instanceof Long)) {
                Map<String, Object> error = message("type", "error");
                if (!asks) error.put("id", message.get("id"));
                error.put("why", "game and seed are whole numbers of 64 bits");
                send(error);
                return;
            }
            if (pig != null && !pig.over) leak();
            pig = new Pig(seed);
            this.asks = asks;
            game = asks ? (Long) message.get("game") : 0;
            id = 0;
            present(message.get("id"));
        }

        void act(Map<?, ?> message, boolean asked) throws IOException {
            Object action = message.get("action");
            String why = null;
            boolean isOpen = !legal.isEmpty() && asked == asks;
            if (!isOpen) {
                why = "no decision is open";
            } else if (asked && !List.of(game, id).equals(Arrays.asList(message.get("game"), message.get("id")))) {
                why = "another decision is open";
            } else if (!(action instanceof Long) || !legal.contains(action)) {
                why = "the action is not legal";
            } else if (refuses) {
                refuses = false;
                why = "the engine thought better of it";
                List<Object> others = new ArrayList<>(legal);
                others.remove(action);
                legal = others.isEmpty() ? legal : others;
            }
            if (why == null) {
                pig.act((Long) action);
                present(message.get("id"));
            } else if (asked) {
                send(message("type", "refused", "game", isOpen ? (Object) game : message.get("game"),
                    "id", isOpen ? (Object) id : message.get("id"), "legal", isOpen ? legal : List.of(), "why", why));
            } else {
                send(message("type", "error", "id", message.get("id"), "why", why));
            }
        }

        /** What the agent sees next: the decision or the end of its game, or the answer to its request. */
        void present(Object request) throws IOException {
            if (asks) for (String text : pig.rolls) send(message("type", "note", "game", game, "text", text));
            double ms = think();
            legal = pig.legal();
            id++;
            if (pig.over) leak();
            Map<String, Object> message = asks
                ? message("type", pig.over ? "over" : "decide", "game", game)
                : message("type", "state", "id", request);
            if (asks && !pig.over) message.put("id", id);
            message.put("state", pig.state());
            if (!asks || !pig.over) message.put("legal", legal);
            message.put("reward", pig.reward);
            if (!asks) message.put("over", pig.over);
            if (pig.over) message.put("won", pig.reward > 0);
            message.put("ms", ms);
            if (asks && pig.over) send(message);
            else deliver(message);
        }

        double think() {
            if (thinkMs == 0) return 0;
            double ms = thinkMs;
            if (lognormal) {
                double variance = Math.log1p(spread * spread);
                double normal = Math.sqrt(-2 * Math.log(1 - thinking.unit())) * Math.cos(2 * Math.PI * thinking.unit());
                ms *= Math.exp(Math.sqrt(variance) * normal - variance / 2);
            }
            long began = System.nanoTime(), wanted = (long) (ms * 1e6);
            if (compute) {
                ThreadMXBean clock = ManagementFactory.getThreadMXBean();
                long until = clock.getCurrentThreadCpuTime() + wanted;
                while (clock.getCurrentThreadCpuTime() < until) Thread.onSpinWait();
            }
            for (long left = wanted; !compute && left > 0; left = began + wanted - System.nanoTime())
                LockSupport.parkNanos(left); // Thread.sleep takes whole milliseconds
            return Math.round((System.nanoTime() - began) / 1e3) / 1e3;
        }

        /** Sends a decide or state message, with the fault that was drawn for it. */
        void deliver(Map<String, Object> message) throws IOException {
            String fault = "";
            for (int i = 0; i < faultKinds.size(); i++) {
                boolean drawn = faults.unit() < faultProbabilities.get(i);
                if (drawn && fault.isEmpty()) fault = faultKinds.get(i);
            }
            List<Object> state = pig.state();
            switch (fault) {
                case "nan" -> message.put("state", List.of(Double.NaN, state.get(1), state.get(2)));
                case "wrong_shape" -> message.put("state", state.subList(0, 2));
                case "deep" -> message.put("state", "@");
                case "illegal_mask" -> message.put("legal", List.of());
                case "wrong_game" -> message.put(asks ? "game" : "id",
                    asks ? (Object) (game + 1) : 1000 + (message.get("id") instanceof Long whole ? whole : 0L));
                default -> { }
            }
            refuses = fault.equals("refuse");
            byte[] payload = encode(message);
            if (fault.equals("deep")) { // no writer nests that deep
                String nested = "[".repeat(100_000) + "]".repeat(100_000);
                payload = new String(payload, StandardCharsets.US_ASCII).replace("\"@\"", nested).getBytes();
            }
            log("->", payload);
            byte[] frame = framed(payload);
            if (fault.isEmpty()) write(frame);
            else spoil(payload, frame, fault);
            previous = frame;
        }

        /** What happens instead of sending `frame`; an IOException closes the connection. */
        void spoil(byte[] payload, byte[] frame, String fault) throws IOException {
            switch (fault) {
                case "crash" -> Runtime.getRuntime().halt(7);
                case "oom" -> {
                    // 16 GiB each: a smaller heap refuses the first, and nothing was touched.
                    for (List<long[]> chunks = new ArrayList<>();;) chunks.add(new long[Integer.MAX_VALUE - 8]);
                }
                case "stop" -> { // goes on here after SIGCONT
                    String stop = "kill -STOP " + ProcessHandle.current().pid();
                    new ProcessBuilder("sh", "-c", stop).start().onExit().join();
                }
                case "slow" -> {
                    write(new byte[0]); // what is held back does not come in between
                    for (byte one : frame) {
                        write(new byte[] {one});
                        pause(1000);
                    }
                    return;
                }
                case "garbage", "mutate" -> frame = framed(scrambled(payload, fault.equals("garbage")));
                case "oversize" -> {
                    frame = new byte[2 << 20];
                    Arrays.fill(frame, (byte) 'x');
                    if (!lines) frame = ByteBuffer.allocate(12).putInt(64 << 20).put(payload, 0, 8).array();
                }
                case "reorder" -> {
                    if (asks) { // in decision mode nothing could overtake it
                        write(previous);
                    } else if (hold(frame)) {
                        return;
                    }
                }
                case "truncate" -> write(Arrays.copyOf(frame, frame.length / 2));
                case "hang", "half_close" -> {
                    synchronized (this) { held = null; }
                    if (fault.equals("half_close") && out instanceof SocketChannel socket) socket.shutdownOutput();
                    else if (fault.equals("half_close")) out.close();
                    while (next() >= 0) { }
                }
                default -> { }
            }
            if (List.of("truncate", "close", "hang", "half_close").contains(fault)) throw new IOException(fault);
            write(frame);
        }

        /** Keeps a frame back until the next one went, or for 100 ms; false where one is kept already. */
        synchronized boolean hold(byte[] frame) {
            if (held != null) return false;
            held = frame;
            new Thread(() -> {
                Connection.pause(100);
                try {
                    synchronized (this) { if (held == frame) write(new byte[0]); }
                } catch (IOException error) {
                    // the peer went
                }
            }).start();
            return true;
        }

        byte[] scrambled(byte[] payload, boolean everywhere) {
            int changes = everywhere ? payload.length : 1 + faults.below(4);
            int[] places = new int[changes];
            for (int i = 0; i < changes; i++) places[i] = everywhere ? i : faults.below(payload.length);
            byte[] changed = payload.clone();
            for (int place : places) {
                changed[place] ^= (byte) (1 + faults.below(255));
                if (changed[place] == '\n' && lines) changed[place] = 11; // the frame is to stay one line
            }
            return changed;
        }

        static void pause(long ms) {
            try {
                Thread.sleep(ms);
            } catch (InterruptedException error) {
                throw new IllegalStateException(error); // nobody interrupts
            }
        }

        static void leak() {
            byte[] more = new byte[(int) (leakMb * (1 << 20))];
            Arrays.fill(more, (byte) 1); // written, so it is really there
            synchronized (kept) { kept.add(more); }
        }
    }

    // ---- listening

    static ServerSocketChannel listening() {
        String place = given.get("socket").isEmpty() ? given.get("port") : given.get("socket");
        try {
            if (given.get("socket").isEmpty()) {
                int port = (int) Math.min(whole("port", 0), 65536);
                InetAddress here = InetAddress.getByName("127.0.0.1");
                return ServerSocketChannel.open().bind(new InetSocketAddress(here, port), 512);
            }
            Path path = Path.of(place);
            SocketAddress address = UnixDomainSocketAddress.of(path);
            boolean socket = Files.exists(path, LinkOption.NOFOLLOW_LINKS)
                && Files.readAttributes(path, BasicFileAttributes.class).isOther();
            if (socket) {
                try {
                    SocketChannel.open(address).close();
                    throw new IOException("Address already in use");
                } catch (java.net.ConnectException error) {
                    Files.delete(path); // nobody listens: a killed engine left it
                }
            }
            return ServerSocketChannel.open(StandardProtocolFamily.UNIX).bind(address, 512);
        } catch (IOException | IllegalArgumentException error) {
            throw fail("cannot listen on " + place + ": " + error.getMessage());
        }
    }

    public static void main(String[] args) throws IOException {
        readSwitches(args);
        Connection.pause((long) (Math.min(number("start-delay-s", 0), 1e9) * 1000));
        if (flags.contains("--stdio")) {
            System.err.println("listening on stdio");
            new Connection(0, new FileInputStream(FileDescriptor.in).getChannel(),
                new FileOutputStream(FileDescriptor.out).getChannel()).run();
            System.exit(0);
        }
        ServerSocketChannel server = listening();
        boolean tcp = given.get("socket").isEmpty();
        int port = tcp ? ((InetSocketAddress) server.getLocalAddress()).getPort() : 0;
        System.err.println("listening on " + (tcp ? "127.0.0.1:" + port : given.get("socket")));
        for (int number = 0;;) {
            SocketChannel channel = server.accept();
            if (open.get() >= maxConnections) {
                channel.close();
                continue;
            }
            open.incrementAndGet();
            if (tcp) channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
            new Thread(new Connection(number++, channel, channel)).start();
        }
    }
}
