package python

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
)

// Bridge measures what the Python processes beside workers cost: steps of one worker against a plain PyTorch script, of two against
// DistributedDataParallel, and recoveries against those of workers in Go.
func Bridge(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("bridge", flag.ExitOnError)
	turns := f.Int("turns", 8, "turns of each side; one more warms up; 0 leaves steps out")
	length := f.Int("steps", 6, "steps of a turn; the first does not count")
	kills := f.Int("kills", 15, "kills of each kind; 0 leaves recoveries out")
	batch := f.Int("batch", 32, "samples of a step; the default takes 500 ms or more")
	micro := f.Int("micro", 4, "samples of a micro-batch")
	width := f.Int("width", 256, "width of the model")
	layers := f.Int("layers", 4, "blocks of the model")
	context := f.Int("context", 128, "bytes of a sample")
	device := f.String("device", "cpu", "cpu, or cuda: one worker on a GPU against a script on it")
	f.StringVar(&peers.Python, "python", peers.Python, "interpreter")
	if err := f.Parse(args); err != nil {
		return err
	}
	if *turns < 0 || *length < 2 || *batch%(2**micro) != 0 {
		return errors.New("--turns must be at least 0, --steps at least 2, and --batch a multiple of twice --micro")
	}
	l, err := lab.NewLab()
	if err != nil {
		return err
	}
	defer os.RemoveAll(l.Dir)
	b := bridge{rec: rec, lab: l, turns: *turns, length: *length, kills: *kills, batch: *batch, micro: *micro, width: *width, context: *context, layers: *layers, device: *device}
	b.options = []string{"--batch", strconv.Itoa(*batch), "--micro", strconv.Itoa(*micro), "--width", strconv.Itoa(*width), "--turn", strconv.Itoa(*length), "--layers", strconv.Itoa(*layers), "--context", strconv.Itoa(*context), "--device", *device}
	b.same = []string{
		"--global-batch", strconv.Itoa(*batch), "--micro-batch", strconv.Itoa(*micro), "--layers", strconv.Itoa(*layers), "--width", strconv.Itoa(*width),
		"--heads", "8", "--context", strconv.Itoa(*context), "--dropout", "0",
	}
	fmt.Printf("model: %d layers of width %d, context %d; %d samples a step, micro-batches of %d\n", *layers, *width, *context, *batch, *micro)
	if b.turns > 0 {
		if err := b.alone(); err != nil {
			return fmt.Errorf("one worker: %w", err)
		}
	}
	if b.turns > 0 && *device == "cpu" {
		if err := b.together(); err != nil {
			return fmt.Errorf("two workers: %w", err)
		}
	}
	if b.kills > 0 && *device == "cpu" {
		return b.recoveries()
	}
	return nil
}

type bridge struct {
	rec                         *report.Recorder
	lab                         *lab.Lab
	turns, length, kills, batch int
	micro, width                int
	context, layers             int
	device                      string
	options                     []string // of the programs
	same                        []string // of the GPT in Go, for the same model
	runs                        int
}

// alone compares one worker and a script.
func (b *bridge) alone() error {
	peer, err := peers.StartPeer("torch_bridge_plain.py", b.environ()...)
	if err != nil {
		return err
	}
	defer peer.Close()
	fmt.Printf("\none worker against a script: %s; ms of a step\n", peer.Hello)
	var ours, theirs, ratios []float64
	row := report.Row{
		Comparison: "bridge", Case: b.model(), Workers: 1, Threads: 1, Ours: "worker with Python", Theirs: "PyTorch script", Unit: "ms", Kind: report.Cost, Goal: 1.02,
	}
	if b.device != "cpu" {
		row.Goal = 1.05
	}
	err = b.byTurns(1, func(turn int, o float64) error {
		all, err := peer.Ask("%d", b.length)
		if err != nil {
			return err
		}
		p := mean(all[1:])
		fmt.Printf("  turn %d  worker %8.1f  script %8.1f\n", turn, o, p)
		if turn > 0 {
			ours, theirs, ratios = append(ours, o), append(theirs, p), append(ratios, o/p)
			row.Add(o, p)
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.rec.Add(row)
	fmt.Printf("  median: worker %.1f, script %.1f; worker by script: median %.3f, range %.3f to %.3f (at most %.2f is wanted)\n",
		lab.Median(ours), lab.Median(theirs), lab.Median(ratios), slices.Min(ratios), slices.Max(ratios), row.Goal)
	if lab.Median(theirs) < 500 {
		fmt.Println("  a step takes less than 500 ms: give a larger --batch or --width")
	}
	return nil
}

// together compares two workers and two ranks, whose best setting is found first.
func (b *bridge) together() error {
	peer, err := peers.StartPeer("torch_bridge_ddp.py", b.environ()...)
	if err != nil {
		return err
	}
	defer peer.Close()
	_, count, _ := strings.Cut(peer.Hello, "settings: ")
	settings, err := strconv.Atoi(count)
	if err != nil {
		return fmt.Errorf("peer says %q", peer.Hello)
	}
	fmt.Printf("\ntwo workers against %s; samples/s\n", peer.Hello)
	best, least := 0, 0.
	for range 2 { // the first time warms up
		for s := range settings {
			all, err := peer.Ask("%d %d", s, b.length)
			if err != nil {
				return err
			}
			if ms := mean(all[1:]); least == 0 || ms < least {
				best, least = s, ms
			}
		}
	}
	fmt.Printf("  setting %d is the best of them\n", best)
	var ours, theirs, ratios []float64
	row := report.Row{
		Comparison: "bridge", Case: b.model(), Workers: 2, Threads: 1, Ours: "workers with Python", Theirs: "DistributedDataParallel", Unit: "samples/s", Kind: report.Rate, Goal: 1,
	}
	err = b.byTurns(2, func(turn int, o float64) error {
		all, err := peer.Ask("%d %d", best, b.length)
		if err != nil {
			return err
		}
		mine, their := 1e3*float64(b.batch)/o, 1e3*float64(b.batch)/mean(all[1:])
		fmt.Printf("  turn %d  workers %7.2f  ranks %7.2f\n", turn, mine, their)
		if turn > 0 {
			ours, theirs, ratios = append(ours, mine), append(theirs, their), append(ratios, mine/their)
			row.Add(mine, their)
		}
		return nil
	})
	if err != nil {
		return err
	}
	b.rec.Add(row)
	fmt.Printf("  median: workers %.2f, ranks %.2f; workers by ranks: median %.3f, range %.3f to %.3f (at least 1 is wanted)\n",
		lab.Median(ours), lab.Median(theirs), lab.Median(ratios), slices.Min(ratios), slices.Max(ratios))
	return nil
}

func mean(x []float64) float64 { return lab.Sum(x) / float64(len(x)) }

// model describes what is trained.
func (b *bridge) model() string {
	return fmt.Sprintf("PyTorch model of %d layers of width %d, batch %d, micro-batch %d, %s", b.layers, b.width, b.batch, b.micro, b.device)
}

// environ is that of the peers.
func (b *bridge) environ() []string {
	return []string{"BRIDGE=" + strings.Join(b.options, " "), "OMP_NUM_THREADS=1", "MKL_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"}
}

// start starts a run of the job, which has its mark in the environment.
func (b *bridge) start(steps int, flags []string, more ...string) (cmd *exec.Cmd, dir string, err error) {
	b.runs++
	dir = filepath.Join(b.lab.Dir, fmt.Sprintf("bridge-%d", b.runs))
	args := append([]string{"run", "--plain", "--python", peers.Python, "--call-timeout", "1h", "--run-dir", dir}, flags...)
	if b.device == "cpu" {
		args = append(args, "--threads", "1")
	}
	args = append(args, filepath.Join(b.lab.Root, "bench/internal/peers/torch_bridge_job.py"), "--steps", strconv.Itoa(steps))
	cmd = exec.Command(filepath.Join(b.lab.Dir, "launcher"), append(append(args, b.options...), more...)...)
	cmd.Env = append(os.Environ(), "SOLITON_BENCH_RUN="+dir)
	cmd.Stdout, cmd.Stderr = new(bytes.Buffer), new(bytes.Buffer)
	return cmd, dir, cmd.Start()
}

// finish waits for the end of a run.
func finish(cmd *exec.Cmd) error {
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("launcher: %w\n%v", err, cmd.Stderr)
	}
	return nil
}

// byTurns trains with so many workers, and calls turn with the mean milliseconds of the steps of each turn but its first, which may have
// begun before. While turn runs, training waits. The last step is in no turn: it ends with a checkpoint.
func (b *bridge) byTurns(workers int, turn func(turn int, ms float64) error) error {
	socket := filepath.Join(b.lab.Dir, fmt.Sprintf("talk-%d", workers))
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	defer listener.Close()
	cmd, dir, err := b.start((b.turns+1)*b.length+1, []string{"--workers", strconv.Itoa(workers), "--stages", "1"}, "--talk", socket)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- finish(cmd)
		_ = listener.Close() // or nothing may ever call
	}()
	err = b.listen(listener, dir, turn)
	if err != nil {
		_ = cmd.Process.Signal(os.Interrupt) // it may have ended
		_ = cmd.Process.Signal(os.Interrupt)
	}
	return errors.Join(<-ended, err)
}

// listen hears of the steps of a run.
func (b *bridge) listen(l net.Listener, dir string, turn func(turn int, ms float64) error) error {
	conn, err := l.Accept()
	if err != nil {
		return fmt.Errorf("the job does not report: %w", err)
	}
	defer conn.Close()
	var first int64
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		var step int
		var at int64
		if _, err := fmt.Sscan(lines.Text(), &step, &at); err != nil {
			return fmt.Errorf("the job reports %q", lines.Text())
		}
		switch step % b.length {
		case 1 % b.length:
			first = at
		case 0:
			rest(dir)
			if err := turn(step/b.length-1, float64(at-first)/1e6/float64(b.length-1)); err != nil {
				return err
			}
			if _, err := conn.Write([]byte{1}); err != nil {
				return err
			}
		}
	}
	return nil
}

// rest waits until the processes of a run, which cannot commit the next step, have no more to do.
func rest(dir string) {
	const look = 200 * time.Millisecond
	for last, now := -1, 0; ; last = now {
		now = 0
		for _, pid := range lab.Marked(dir) {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			_, text, _ = bytes.Cut(text, []byte(") "))
			if fields := strings.Fields(string(text)); len(fields) > 13 {
				user, _ := strconv.Atoi(fields[11])
				system, _ := strconv.Atoi(fields[12])
				now += user + system
			}
		}
		if last >= 0 && now-last <= 1 { // ticks of 10 ms: heartbeats
			return
		}
		time.Sleep(look)
	}
}
