// Package browsertest tests the dashboard in a browser. It is a module of its own, so that users of the runtime do not get the
// browser's driver into their module graph.
package browsertest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/internal/observe/dashboard"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/require"
	"github.com/soliton-train/soliton/launcher/internal/inspect"
)

var screenshots = flag.String("screenshots", "", "run the GPT example, and write pictures of its page to this `folder`")

// Built once: the launcher and programs for it.
var binary, mlp, gpt string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "browsertest-")
	if err != nil {
		panic(err)
	}
	build := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/mlp", "./examples/gpt")
	build.Dir = "../.."
	status := 1
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "%s%v\n", out, err)
	} else {
		binary, mlp, gpt = filepath.Join(dir, "launcher"), filepath.Join(dir, "mlp"), filepath.Join(dir, "gpt")
		status = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(status)
}

// pageArgs make a run that is under way for as long as a browser may need.
var pageArgs = []string{"--steps", "1000000", "--micro-batch", "4", "--eval-every", "0"}

// pageRun is a run with a page.
type pageRun struct {
	t          *testing.T
	cmd        *exec.Cmd
	dir        string
	url, token string
}

// beginPage starts a run with a page, and returns when it trains.
func beginPage(t *testing.T, program string, args, flags []string) *pageRun {
	t.Helper()
	flags = append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--ui=127.0.0.1:0"}, flags...)
	dir := t.TempDir()
	// Processes of a launcher that was killed may write for a moment longer.
	t.Cleanup(func() { await(t, "the end of what writes into "+dir, func() bool { return os.RemoveAll(dir) == nil }) })
	r := &pageRun{t: t, cmd: exec.Command(binary, append(append(flags, program), args...)...), dir: filepath.Join(dir, "run")}
	r.cmd.Dir = dir
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var read sync.WaitGroup
	t.Cleanup(func() { r.cmd.Process.Kill(); read.Wait(); r.cmd.Wait() })
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	read.Go(func() { io.Copy(io.Discard, lines) })
	r.until("start", 1)
	secret, err := os.ReadFile(filepath.Join(r.dir, dashboard.TokenName))
	if err != nil {
		t.Fatal(err)
	}
	r.token = strings.TrimSpace(string(secret))
	if strings.Contains(line, r.token) {
		t.Error("the token is in what --plain prints")
	}
	r.url = strings.Fields(line)[1]
	return r
}

// newest is the newest step that the run has told of.
func (r *pageRun) newest() int {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.dir, "metrics.jsonl"))
	if err != nil {
		r.t.Fatal(err)
	}
	return bytes.Count(text, []byte("\n"))
}

// events returns the events of a kind so far.
func (r *pageRun) events(kind string) (all []rundir.Event) {
	text, _ := os.ReadFile(filepath.Join(r.dir, "events.jsonl"))
	for line := range strings.Lines(string(text)) {
		var e rundir.Event
		if json.Unmarshal([]byte(line), &e) == nil && e.Kind == kind {
			all = append(all, e)
		}
	}
	return all
}

// until waits until there are so many events of a kind.
func (r *pageRun) until(kind string, n int) {
	r.t.Helper()
	await(r.t, fmt.Sprintf("%d events %q", n, kind), func() bool {
		if len(r.events("end"))+len(r.events("failed")) > 0 && len(r.events(kind)) < n {
			r.t.Fatalf("the run ended before %q came %d times", kind, n)
		}
		return len(r.events(kind)) >= n
	})
}

// await waits for a condition that others bring about.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 60 s: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// leadingProcess returns the process of the agent that answers for a run, 0 for none.
func leadingProcess(dir string) (pid int) {
	run, err := rundir.ReadWorkers(dir)
	if err != nil {
		return 0
	}
	c, err := net.Dial("unix", run.Agent)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(peer.Pid)
		}
	})
	return pid
}

// browse opens a browser; what it complains about is an error of the test.
func browse(t *testing.T) context.Context {
	t.Helper()
	path, err := exec.LookPath("chromium")
	require.Tool(t, "browser", err == nil, "no chromium")
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox)...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	listening, stop := context.WithCancel(ctx)
	messages := chromedp.Console(listening)
	var read sync.WaitGroup
	read.Go(func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			t.Errorf("the page's console: %v", m)
		}
	})
	t.Cleanup(func() { stop(); read.Wait() })
	return ctx
}

// do runs actions in the browser.
func do(ctx context.Context, t *testing.T, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

// text returns the value of an expression of the page.
func text(ctx context.Context, t *testing.T, expression string) string {
	t.Helper()
	s, err := chromedp.Run(ctx, chromedp.Evaluate[string](expression))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// holds waits until an expression of the page is true.
func holds(expression string) chromedp.Action[chromedp.Void] {
	poll := chromedp.Poll[chromedp.Void](expression, chromedp.WithPollingTimeout(60*time.Second))
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := poll(ctx, target)
		if err == nil {
			return nil
		}
		shown, _ := chromedp.Evaluate[string](`document.body.innerText`)(ctx, target)
		return fmt.Errorf("%s: %w; the page shows\n%s", expression, err, shown)
	})
}

// click clicks an element as a hand does: where it is to be seen, with the time between down and up in which the page may
// change. What moves away under the pointer before the button is down is tried again.
func click(selector string) chromedp.Action[chromedp.Void] {
	at := chromedp.Poll[[]float64](fmt.Sprintf(`(() => {
		const e = document.querySelector(%q);
		if (!e || e.disabled) return null;
		e.scrollIntoView({ block: 'center' });
		const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;
		return document.elementFromPoint(x, y) === e && [x, y];
	})()`, selector), chromedp.WithPollingTimeout(60*time.Second))
	hit := chromedp.Evaluate[bool](fmt.Sprintf(`Boolean(document.querySelector(%q)?.matches(':active'))`, selector))
	left := func(p *input.DispatchMouseEventParams) { p.Button, p.ClickCount = input.MouseButtonLeft, 1 }
	return chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		for {
			p, err := at(ctx, target)
			if err != nil {
				return err
			}
			if _, err := chromedp.MouseEvent(chromedp.MousePressed, p[0], p[1], left)(ctx, target); err != nil {
				return err
			}
			ours, err := hit(ctx, target)
			if err != nil {
				return err
			}
			if !ours {
				p = []float64{0, 0} // a release elsewhere is no click
			}
			if _, err := chromedp.MouseEvent(chromedp.MouseReleased, p[0], p[1], left)(ctx, target); err != nil || ours {
				return err
			}
		}
	})
}

// acts is a run that takes note of what pages ask for.
type acts chan dashboard.Action

func (acts) Watch(bool) {}
func (a acts) Act(_ context.Context, x dashboard.Action) (string, error) {
	a <- x
	return "done", nil
}

// TestPageKeepsClicks changes the plan while the pointer is down on a button whose card has another place in the new
// one: the click counts, the card moves afterwards, and the button keeps the focus.
func TestPageKeepsClicks(t *testing.T) {
	ctx := browse(t)
	s, err := dashboard.Listen(dashboard.Config{Addr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	asked := make(acts, 1)
	s.Attach(asked)
	workers := []rundir.Worker{{ID: 0, Stages: []int{0}}, {ID: 1, Stages: []int{0}}, {ID: 2, Stages: []int{1}}}
	s.Show(view.Begin{Job: rundir.Job{Program: "p", Steps: 9}, Workers: workers, Stages: []view.Stage{{Lo: 0, Hi: 1, Workers: []int{0, 1}}, {Lo: 1, Hi: 2, Workers: []int{2}}}})
	const kill = `.worker[data-worker="2"] .kill`
	var at []float64
	do(ctx, t, chromedp.EmulateViewport(1280, 900), chromedp.Navigate(s.Link()), chromedp.Func(func(ctx context.Context, _ *chromedp.Target) (err error) {
		at, err = chromedp.Run(ctx, chromedp.Poll[[]float64](fmt.Sprintf(`(() => {
			const e = document.querySelector('%s');
			if (!e || e.disabled) return null;
			e.scrollIntoView({ block: 'center' });
			const r = e.getBoundingClientRect();
			return [r.x + 5, r.y + 5];
		})()`, kill)))
		return err
	}))
	left := func(p *input.DispatchMouseEventParams) { p.Button, p.ClickCount = input.MouseButtonLeft, 1 }
	do(ctx, t, chromedp.MouseEvent(chromedp.MousePressed, at[0], at[1], left))
	workers[2].Stages = []int{0}
	s.Show(view.Plan{Reason: "another", Workers: workers, Stages: []view.Stage{{Lo: 0, Hi: 2, Workers: []int{2, 0, 1}}}})
	do(ctx, t, holds(`document.querySelector('#note').textContent == 'another'`),
		chromedp.MouseEvent(chromedp.MouseReleased, at[0], at[1], left))
	select {
	case got := <-asked:
		if got != (dashboard.Action{Do: "kill", Worker: 2}) {
			t.Errorf("asked for %+v", got)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the click is lost")
	}
	do(ctx, t, holds(`document.querySelectorAll('.stage').length == 1`), holds(`document.querySelector('.stage .worker').dataset.worker == '2'`),
		holds(fmt.Sprintf(`document.activeElement == document.querySelector('%s')`, kill)))
}

func TestPage(t *testing.T) {
	ctx := browse(t)
	r := beginPage(t, mlp, pageArgs, []string{"--workers", "4", "--stages", "2", "--detect", "10s"})
	do(ctx, t,
		chromedp.EmulateViewport(1280, 900),
		chromedp.Navigate(r.url+"#"+r.token),
		holds(`document.querySelectorAll('.worker[data-worker]').length == 4`),
		holds(`document.querySelector('#state').dataset.state == 'training'`),
		holds(`document.querySelector('#loss-chart .curve') != null`),
		holds(`document.querySelectorAll('#gantt .f').length > 0`),
	)
	if address := text(ctx, t, `location.href`); strings.Contains(address, r.token) {
		t.Errorf("the token stays in the address: %q", address)
	}
	const curve = `document.querySelector('#loss-chart .curve').getAttribute('d')`
	do(ctx, t, holds(fmt.Sprintf(`%s != %q`, curve, text(ctx, t, curve)))) // it moves

	do(ctx, t, click(`.worker[data-worker="2"] .kill`),
		holds(`[...document.querySelectorAll('#events .badge')].some((b) => b.textContent == 'lost')`),
		holds(`[...document.querySelectorAll('#events .badge')].some((b) => b.textContent == 'recovered')`),
		holds(`document.querySelector('#gone-list').textContent.includes('worker 2')`),
		holds(`document.querySelectorAll('#recoveries li').length == 1`),
		holds(`document.querySelectorAll('.worker[data-worker]').length == 3`))
	r.until("recovered", 1)
	if lost := r.events("lost"); len(lost) != 1 || lost[0].Worker != 2 {
		t.Errorf("lost: %v", lost)
	}

	do(ctx, t, chromedp.Evaluate[chromedp.Void](`(() => { const s = document.querySelector('.worker[data-worker="0"] select'); s.value = '0.5'; s.dispatchEvent(new Event('change')); })()`),
		holds(`document.querySelector('#toasts').textContent.includes('worker 0 computes at 0.5')`))
	do(ctx, t, click(`#add`), holds(`document.querySelector('.worker[data-worker="4"]') != null`))
	r.until("begin", 1)
	r.until("joined", 1)
	do(ctx, t, click(`.worker[data-worker="1"] .leave`),
		holds(`document.querySelector('#gone-list').textContent.includes('worker 1')`))
	r.until("left", 1)
	do(ctx, t, click(`.worker[data-worker="0"] .freeze`), holds(`document.querySelector('#toasts').textContent.includes('freeze: worker 0')`))
	r.until("recovered", 2) // without it; its card comes back
	do(ctx, t, holds(`document.querySelector('.worker[data-worker="0"]')?.textContent.includes('is awaited')`),
		click(`.worker[data-worker="0"] .thaw`), holds(`document.querySelector('#toasts').textContent.includes('thaw: worker 0')`))
	r.until("joined", 2)
	do(ctx, t, holds(`document.querySelector('.stage .worker[data-worker="0"]') != null`))
	do(ctx, t, click(`#stop`), click(`#stop-do`), holds(`document.querySelector('#state').dataset.state == 'stopped'`),
		holds(`document.querySelector('#stop').disabled`))
	if r.cmd.Wait(); r.cmd.ProcessState.ExitCode() != session.ExitFailed {
		t.Errorf("exit status %d", r.cmd.ProcessState.ExitCode())
	}
}

// TestPageOnHosts: the page, the measures and the traces of a run on several hosts go on when the one that leads
// has died.
func TestPageOnHosts(t *testing.T) {
	t.Parallel()
	ctx := browse(t)
	r := beginPage(t, mlp, pageArgs, []string{"--workers", "3", "--emulate-hosts", "3", "--detect", "2s"})
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(chromedp.Run(ctx, chromedp.Evaluate[string](`document.body.innerText`)))
		}
	})
	steps := func() (n int) {
		answer, err := http.Get(r.url + "metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
			if name, value, _ := strings.Cut(lines.Text(), "} "); strings.HasPrefix(name, "soliton_step_duration_seconds_count{") {
				n, _ = strconv.Atoi(value)
			}
		}
		return n
	}
	more := func(than int) int {
		await(t, "measures of more steps", func() bool { return steps() > than })
		return steps()
	}
	const shown = `Number(document.querySelector('#step').textContent.slice(5))`
	do(ctx, t, chromedp.EmulateViewport(1280, 900), chromedp.Navigate(r.url+"#"+r.token), holds(shown+` > 3`),
		holds(`document.querySelectorAll('#gantt .f').length > 0`))
	before := more(0)
	leader := 0
	await(t, "an agent that leads", func() bool {
		leader = leadingProcess(r.dir)
		return leader > 1
	})
	for _, pid := range append(platform.Children(leader), leader) {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	r.until("lead", 1)
	r.until("recovered", 1)
	newest := r.newest()
	do(ctx, t, holds(`document.querySelectorAll('.worker[data-worker]').length == 2`), holds(fmt.Sprintf(`%s > %d`, shown, newest)),
		holds(`document.querySelector('#state').dataset.state == 'training'`))
	more(max(before, newest/2))
	do(ctx, t, click(`.worker .kill`), holds(`document.querySelectorAll('.worker[data-worker]').length == 1`))
	r.until("recovered", 2)
	recovered := r.events("recovered")
	var roots []trace.Span
	await(t, "traces of both recoveries", func() bool {
		spans, err := inspect.ReadTraces(filepath.Join(r.dir, "traces.jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		roots = slices.DeleteFunc(spans, func(s trace.Span) bool { return s.Name != trace.Recovery || s.True(trace.KeySuperseded) })
		return len(roots) == len(recovered)
	})
	for i, e := range recovered {
		if roots[i].End.Sub(e.Time.Time).Abs() > time.Millisecond || i > 0 && roots[i].Trace == roots[i-1].Trace {
			t.Errorf("%+v, event %+v", roots[i], e)
		}
	}
}

// TestScreenshots makes the pictures of the documentation.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("-screenshots names no folder")
	}
	ctx := browse(t)
	args := strings.Fields("--layers 6 --width 64 --heads 4 --context 64 --global-batch 32 --micro-batch 4 --steps 260 --eval-every 40")
	r := beginPage(t, gpt, args, []string{"--workers", "4", "--stages", "2", "--respawn"})
	shot := func(name string, width, height int64, scheme string) chromedp.Action[chromedp.Void] {
		return chromedp.Steps(
			chromedp.EmulateViewport(width, height, chromedp.EmulateScale(1.5)),
			chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
				_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
					Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
				})
				return err
			}),
			chromedp.Evaluate[chromedp.Void](`(scrollTo(0, 0), new Promise((r) => setTimeout(r, 700)))`, chromedp.EvalAwaitPromise),
			chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
				picture, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
				if err != nil {
					return err
				}
				return os.WriteFile(filepath.Join(*screenshots, name), picture, 0o644)
			}),
		)
	}
	at := func(step int) chromedp.Action[chromedp.Void] {
		return holds(fmt.Sprintf(`Number(document.querySelector('#step').textContent.slice(5)) >= %d`, step))
	}
	do(ctx, t, chromedp.EmulateViewport(1280, 900), chromedp.Navigate(r.url+"#"+r.token), at(60),
		click(`.worker[data-worker="2"] .kill`), at(100),
		click(`.worker[data-worker="1"] .leave`), at(130),
		click(`#add`), at(160),
		click(`.worker[data-worker="0"] .kill`), at(190),
		shot("dashboard-light.png", 1280, 1560, "light"), shot("dashboard-dark.png", 1280, 1560, "dark"), shot("dashboard-phone.png", 390, 844, "light"),
		chromedp.EmulateViewport(1280, 900), holds(`document.querySelector('#state').dataset.state == 'done'`), shot("finished.png", 1280, 700, "light"))
}
