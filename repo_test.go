package soliton_test

// The rules of this repository that no compiler or linter knows. Each rule is a function over a file tree, so that the tests at
// the end can show that it finds what it forbids.

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

const module = "github.com/soliton-train/soliton"

// An importRule forbids packages to import others. Patterns are folders below the module or whole import paths; "x/..." means x
// and all below it.
type importRule struct {
	from   []string
	except []string // of from; also single files
	ban    []string
	allow  []string // of ban
	tests  bool     // test files obey too
	why    string
}

// floors are the layers of docs/architecture.md, top first: a package imports only packages of its own floor's folder and of floors
// below it, so no arrow runs back up. Each package belongs to the first pattern that matches it.
var floors = [][]string{
	{"launcher/...", "examples/...", "bench/..."},
	{"nn/...", "data/...", "trainer/trainertest/...", "elastic", "zero", "dvfs", "comm"},
	{"trainer/...", "internal/sim/..."},
	{"internal/worker/...", "internal/host/..."},
	{"internal/observe/view/...", "internal/observe/dashboard/...", "internal/observe/telemetry/..."},
	{"internal/controller/..."},
	{"internal/net/gossip/...", "internal/net/control/..."},
	{"internal/plan/...", "internal/store/archive/..."},
	{"internal/net/commtest/...", "internal/store/checkpoint/..."},
	{"internal/net/...", "internal/store/...", "internal/observe/trace/...", "internal/chaos/..."},
	{"kernel"},
	{"internal/compute/...", "internal/platform/...", "internal/testkit/..."},
	{"internal/dvfs/..."},
	{"internal/id", "internal/timing", "internal/faults", "rng/..."},
}

// importRules are what the floors do not say.
var importRules = []importRule{
	{
		from: []string{"rng", "internal/id", "internal/timing", "internal/faults"}, ban: []string{module + "/..."},
		why: "rng, internal/id, internal/timing and internal/faults are leaves: a package that uses them takes nothing else along",
	},
	{
		from: []string{"nn/...", "examples/..."}, except: []string{"nn/paths_test.go"}, tests: true, ban: []string{module + "/internal/..."},
		why: "nn and the examples are programs like a user's: what they need is public",
	},
	{
		from: []string{"internal/dvfs/...", "internal/plan/graph"}, except: []string{"internal/dvfs/nvml"}, ban: []string{module + "/..."}, allow: []string{"internal/faults"},
		why: "internal/dvfs and internal/plan/graph are leaves, so that they are tested and understood by themselves",
	},
	{
		from: []string{"internal/dvfs/nvml"}, ban: []string{module + "/..."}, allow: []string{"internal/dvfs"},
		why: "cards are clocks, and need to know no more",
	},
	{
		from: []string{"internal/controller/...", "internal/plan/...", "internal/host/agree", "internal/worker/..."}, ban: []string{"internal/dvfs/..."},
		why: "plans are made of measured times, never of clocks; the host alone knows both",
	},
	{
		from: []string{"..."}, except: []string{"internal/dvfs/nvml"}, tests: true, ban: []string{"github.com/NVIDIA/..."},
		why: "NVIDIA's library and cgo are in internal/dvfs/nvml alone",
	},
	{
		from: []string{"..."}, except: []string{"launcher/..."}, tests: true, ban: []string{"internal/dvfs/nvml"},
		why: "with internal/dvfs/nvml comes cgo, which users' programs are to do without; the launcher hands clocks on",
	},
	{
		from: []string{"..."}, except: []string{"launcher/internal/bucket/...", "data/bucket"}, tests: true, ban: []string{"github.com/minio/..."},
		why: "buckets are one kind of archive.Bucket, or of data, which is all that the rest needs to know; users' programs do without their client unless they ask for it",
	},
	{
		from: []string{"..."}, except: []string{"launcher/internal/bucket/..."}, tests: true, ban: []string{"google.golang.org/api/...", "github.com/Azure/..."},
		why: "buckets are one kind of archive.Bucket, which is all that the rest needs to know; users' programs are to do without their clients",
	},
	{
		from: []string{"..."}, ban: []string{"launcher/...", "examples/...", "bench/..."}, tests: true,
		except: []string{"launcher/...", "examples/...", "bench/..."},
		why:    "launcher, examples and bench are ends: what others need from them belongs into a package",
	},
	{
		from: []string{"internal/worker/..."}, ban: []string{"internal/host/...", "internal/controller/..."},
		why: "workers and hosts meet in messages, never in calls",
	},
	{
		from: []string{"internal/host/..."}, ban: []string{"internal/worker/..."},
		why: "workers and hosts meet in messages, never in calls",
	},
	{
		from: []string{"internal/host/session/..."}, ban: []string{"context", "net", "os", "os/...", "sync", "sync/...", "golang.org/x/sys/...", module + "/internal/host/agree"},
		why: "the session decides and its host acts: it has no goroutine, socket, file or clock",
	},
	{
		from: []string{"..."}, except: []string{"internal/chaos/...", "internal/worker/process", "launcher/..."},
		ban: []string{"internal/chaos/..."},
		why: "what detects, plans and recovers must know a fault by its effects only",
	},
	{
		from: []string{"internal/chaos/..."}, ban: []string{module + "/..."}, allow: []string{"rng", "internal/platform"},
		why: "faults are injected without knowing plans, detectors or the controller",
	},
	{
		from: []string{"..."}, except: []string{"internal/observe/view/...", "launcher/..."},
		ban: []string{"github.com/charmbracelet/...", "github.com/muesli/..."}, tests: true,
		why: "only the view may draw on a terminal; everything else hands it values",
	},
	{
		from: []string{"..."}, except: []string{"launcher/..."}, ban: []string{"github.com/spf13/..."}, tests: true,
		why: "flags are read in launcher alone; a library is configured by its caller",
	},
	{
		from: []string{"..."}, except: []string{"internal/host/agree/raftlog"}, tests: true,
		ban: []string{"github.com/hashicorp/raft/...", "github.com/hashicorp/raft-boltdb/...", "go.etcd.io/bbolt/..."},
		why: "raft is one implementation of agree.Log, which is all that the rest needs to know",
	},
	{
		from: []string{"internal/host/agree/..."}, ban: []string{module + "/..."}, allow: []string{"internal/host/agree", "internal/id", "internal/faults", "internal/timing", "internal/platform", "internal/net/auth"},
		why: "agreement needs to know of a job no more than what orders its plans",
	},
	{
		from: []string{"..."}, ban: []string{"github.com/mmcloughlin/avo/..."}, tests: true,
		why: "avo generates assembly in the module internal/compute/kernel/asm, so that users do not download it",
	},
	{
		from: []string{"internal/worker/core"}, ban: []string{"sync/...", "time", "context", "net/...", "os/..."},
		why: "the core of a worker decides; goroutines, clocks and sockets are in its shell",
	},
	{
		from: bitFeeders, ban: []string{"math/rand/...", "crypto/rand"},
		why: "every draw that reaches the training bits comes from rng, which can make it again",
	},
}

// bitFeeders are the packages whose arithmetic reaches parameters, losses or norms.
var bitFeeders = []string{
	"rng", "nn/...", "kernel", "trainer/...", "internal/compute/...", "internal/worker/...", "internal/testkit/exact/...",
}

// unevenMath are the functions of package math that are not rounded correctly and differ between processors. Sqrt, FMA, Floor
// and the like have one right answer.
var unevenMath = regexp.MustCompile(
	`^(Exp|Exp2|Expm1|Pow|Pow10|Log|Log2|Log10|Log1p|Sin|Cos|Tan|Sincos|Asin|Acos|Atan|Atan2|Sinh|Cosh|Tanh|Asinh|Acosh|Atanh|` +
		`Cbrt|Hypot|Gamma|Lgamma|Erf|Erfc|Erfinv|Erfcinv|J0|J1|Jn|Y0|Y1|Yn)$`)

func TestImports(t *testing.T)           { report(t, checkImports(source(t), importRules)) }
func TestFloors(t *testing.T)            { report(t, checkFloors(source(t), floors)) }
func TestSizes(t *testing.T)             { report(t, checkSizes(source(t))) }
func TestMap(t *testing.T)               { report(t, checkMap(source(t), os.DirFS("."))) }
func TestPackageComments(t *testing.T)   { report(t, checkPackageComments(source(t))) }
func TestGuarantees(t *testing.T)        { report(t, checkGuarantees(source(t), os.DirFS("."))) }
func TestNoUnevenMath(t *testing.T)      { report(t, checkUnevenMath(source(t), bitFeeders)) }
func TestNoSleepInTests(t *testing.T)    { report(t, checkSleeps(source(t))) }
func TestNoReplace(t *testing.T)         { report(t, checkReplace(os.DirFS("."))) }
func TestReadmeTestCommand(t *testing.T) { report(t, checkTestCommand(os.DirFS("."))) }

func report(t *testing.T, faults []string) {
	t.Helper()
	for _, f := range faults {
		t.Error(f)
	}
}

// A file is one parsed Go file.
type file struct {
	name string // path below the root
	test bool
	pkg  string // package name
	ast  *ast.File
	set  *token.FileSet
}

func (f file) dir() string { return path.Dir(f.name) }

func (f file) at(p token.Pos) string { return fmt.Sprintf("%s:%d", f.name, f.set.Position(p).Line) }

// source parses the module.
func source(t *testing.T) []file {
	t.Helper()
	files, err := parse(os.DirFS("."))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Fatal("no Go files found")
	}
	return files
}

// parse returns the Go files of one module: not those of hidden folders, testdata or modules inside.
func parse(root fs.FS) ([]file, error) {
	var files []file
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			_, nested := fs.Stat(root, path.Join(name, "go.mod"))
			if name != "." && (nested == nil || d.Name()[0] == '.' || d.Name()[0] == '_' || d.Name() == "testdata" || name == "runs") {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(name) != ".go" {
			return nil
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, file{name, strings.HasSuffix(name, "_test.go"), tree.Name.Name, tree, set})
		return nil
	})
	return files, err
}

// checkFloors finds imports that run up, and packages that have no floor.
func checkFloors(files []file, floors [][]string) (faults []string) {
	floor := func(pkg string) int {
		for i, patterns := range floors {
			if matches(patterns, pkg) {
				return i
			}
		}
		return -1
	}
	for _, f := range files {
		from := floor(f.dir())
		if f.test || f.dir() == "." {
			continue
		}
		if from < 0 {
			faults = append(faults, fmt.Sprintf("%s: %s has no floor", f.name, f.dir()))
			continue
		}
		for _, spec := range f.ast.Imports {
			p, _ := strconv.Unquote(spec.Path.Value)
			if to, ours := strings.CutPrefix(p, module+"/"); ours && floor(to) < from {
				faults = append(faults, fmt.Sprintf("%s: %s must not import %s, which is above it", f.at(spec.Pos()), f.dir(), to))
			}
		}
	}
	return faults
}

// A folder has at most maxFiles files of the product and a file at most maxLines lines, so that both are read in one go.
const (
	maxFiles = 14
	maxLines = 600
)

// checkSizes finds folders and files that are too large.
func checkSizes(files []file) (faults []string) {
	count := map[string]int{}
	for _, f := range files {
		if f.test {
			continue
		}
		count[f.dir()]++
		if n := f.set.File(f.ast.Pos()).LineCount(); n > maxLines {
			faults = append(faults, fmt.Sprintf("%s: has %d lines, more than %d", f.name, n, maxLines))
		}
	}
	for dir, n := range count {
		if n > maxFiles {
			faults = append(faults, fmt.Sprintf("%s: has %d files, more than %d", dir, n, maxFiles))
		}
	}
	slices.Sort(faults)
	return faults
}

// checkMap wants docs/architecture.md to name every package, so that its map stays whole, and no package that is gone.
func checkMap(files []file, root fs.FS) (faults []string) {
	text, err := fs.ReadFile(root, "docs/architecture.md")
	if err != nil {
		return []string{err.Error()}
	}
	packages := map[string]bool{}
	for _, f := range files {
		if !f.test && f.dir() != "." && !strings.HasPrefix(f.dir(), "examples/") {
			packages[f.dir()] = true
		}
	}
	named := map[string]bool{}
	for _, m := range regexp.MustCompile("`([a-z]+(?:/[a-z0-9]+)*)`").FindAllStringSubmatch(string(text), -1) {
		named[m[1]] = true
		if strings.HasPrefix(m[1], "internal/") && !packages[m[1]] {
			if _, err := fs.Stat(root, m[1]); err != nil {
				faults = append(faults, fmt.Sprintf("docs/architecture.md: %s is not there", m[1]))
			}
		}
	}
	for _, m := range regexp.MustCompile("`([a-z]+(?:/[a-z0-9_]+)+\\.go)`").FindAllStringSubmatch(string(text), -1) {
		if _, err := fs.Stat(root, m[1]); err != nil {
			faults = append(faults, fmt.Sprintf("docs/architecture.md: %s is not there", m[1]))
		}
	}
	for p := range packages {
		if !named[p] {
			faults = append(faults, fmt.Sprintf("docs/architecture.md: the map does not name %s", p))
		}
	}
	slices.Sort(faults)
	return faults
}

// checkGuarantees wants every promise of docs/guarantees.md to name tests that hold it, and all of them to exist. The tests stand
// in the last cell of a row, as folder.Test.
func checkGuarantees(files []file, root fs.FS) (faults []string) {
	text, err := fs.ReadFile(root, "docs/guarantees.md")
	if err != nil {
		return []string{err.Error()}
	}
	tests := map[string]bool{}
	for _, f := range files {
		for _, d := range f.ast.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && f.test && fn.Recv == nil {
				tests[f.dir()+"."+fn.Name.Name] = true
			}
		}
	}
	name := regexp.MustCompile("`([a-z0-9/]+)\\.((?:Test|Fuzz)\\w+)`")
	for row := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "|"), "|")
		named := name.FindAllStringSubmatch(cells[len(cells)-1], -1)
		if last := strings.TrimSpace(cells[len(cells)-1]); strings.HasPrefix(row, "|") && len(named) == 0 && last != "held by" && (last == "" || strings.Trim(last, "-") != "") {
			faults = append(faults, fmt.Sprintf("docs/guarantees.md: no test holds %q", strings.TrimSpace(cells[0])))
		}
		for _, n := range named {
			if !tests[n[1]+"."+n[2]] && !inTestModule(root, n[1], n[2]) {
				faults = append(faults, fmt.Sprintf("docs/guarantees.md: %s.%s is not there", n[1], n[2]))
			}
		}
	}
	return faults
}

// inTestModule reports whether the folder of a module for tests has a test.
func inTestModule(root fs.FS, dir, test string) bool {
	if !slices.Contains(testModules, dir+"/go.mod") {
		return false
	}
	names, _ := fs.Glob(root, dir+"/*_test.go")
	return slices.ContainsFunc(names, func(name string) bool {
		text, err := fs.ReadFile(root, name)
		return err == nil && strings.Contains(string(text), "\nfunc "+test+"(")
	})
}

// matches reports whether a folder or import path falls under one of the patterns.
func matches(patterns []string, p string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		stem, below := strings.CutSuffix(pattern, "...")
		if !below {
			return p == pattern
		}
		return stem == "" || p == strings.TrimSuffix(stem, "/") || strings.HasPrefix(p, stem)
	})
}

func checkImports(files []file, rules []importRule) (faults []string) {
	for _, f := range files {
		for _, spec := range f.ast.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				panic(err) // the parser has accepted it
			}
			local := strings.TrimPrefix(imported, module+"/") // our own packages go by their folder, too
			for _, r := range rules {
				applies := (r.tests || !f.test) && matches(r.from, f.dir()) && !matches(r.except, f.dir()) && !matches(r.except, f.name)
				banned := matches(r.ban, imported) || matches(r.ban, local)
				if applies && banned && !matches(r.allow, local) {
					faults = append(faults, fmt.Sprintf("%s: %s must not import %s: %s", f.at(spec.Pos()), f.dir(), imported, r.why))
				}
			}
		}
	}
	return faults
}

// checkPackageComments wants exactly one package comment in each package with code, beginning as go doc expects it.
func checkPackageComments(files []file) (faults []string) {
	comments := map[string][]string{}
	var dirs []string
	for _, f := range files {
		if f.test {
			continue
		}
		if _, seen := comments[f.dir()]; !seen {
			dirs = append(dirs, f.dir())
			comments[f.dir()] = nil
		}
		if f.ast.Doc == nil || f.ast.Doc.Text() == "" { // a directive is no comment
			continue
		}
		comments[f.dir()] = append(comments[f.dir()], f.name)
		begin := "Package " + f.pkg + " "
		if f.pkg == "main" {
			begin = "Command " + path.Base(f.dir()) + " "
		}
		if !strings.HasPrefix(strings.Join(strings.Fields(f.ast.Doc.Text()), " ")+" ", begin) {
			faults = append(faults, fmt.Sprintf("%s: the package comment must begin with %q", f.at(f.ast.Doc.Pos()), begin))
		}
	}
	for _, dir := range dirs {
		if found := comments[dir]; len(found) != 1 {
			faults = append(faults, fmt.Sprintf("%s: has %d package comments %v, want one", dir, len(found), found))
		}
	}
	return faults
}

// selections visits the places where a file uses a name of the package with the given import path: the whole call where it is
// called, else the name.
func selections(f file, importPath string, use func(name string, n ast.Node)) {
	local := ""
	for _, spec := range f.ast.Imports {
		if p, _ := strconv.Unquote(spec.Path.Value); p == importPath {
			local = path.Base(importPath)
			if spec.Name != nil {
				local = spec.Name.Name
			}
		}
	}
	if local == "" {
		return
	}
	calls := map[ast.Expr]ast.Node{}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			calls[n.Fun] = n
		case *ast.SelectorExpr:
			if x, ok := n.X.(*ast.Ident); !ok || x.Name != local {
				break
			}
			if call, ok := calls[n]; ok {
				use(n.Sel.Name, call)
			} else {
				use(n.Sel.Name, n)
			}
		}
		return true
	})
}

func checkUnevenMath(files []file, dirs []string) (faults []string) {
	for _, f := range files {
		if f.test || !matches(dirs, f.dir()) {
			continue
		}
		selections(f, "math", func(name string, n ast.Node) {
			if unevenMath.MatchString(name) {
				faults = append(faults, fmt.Sprintf("%s: math.%s gives other bits on other processors; use the functions of package kernel",
					f.at(n.Pos()), name))
			}
		})
	}
	return faults
}

// checkSleeps forbids tests to wait by the clock. Two sleeps are none: in a function given to synctest.Test, where the clock is not
// the real one, and as the pause in a loop that waits for a condition.
func checkSleeps(files []file) (faults []string) {
	for _, f := range files {
		if !f.test {
			continue
		}
		var allowed []ast.Node
		selections(f, "testing/synctest", func(name string, call ast.Node) { allowed = append(allowed, call) })
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if loop, ok := n.(*ast.ForStmt); ok && loop.Cond != nil && loop.Post == nil {
				allowed = append(allowed, loop)
			}
			return true
		})
		selections(f, "time", func(name string, use ast.Node) {
			inside := slices.ContainsFunc(allowed, func(n ast.Node) bool { return n.Pos() <= use.Pos() && use.End() <= n.End() })
			if name == "Sleep" && !inside {
				faults = append(faults, f.at(use.Pos())+": time.Sleep in a test is too short on a slow machine and too long on a fast one; "+
					"wait for a condition, or use testing/synctest")
			}
		})
	}
	return faults
}

// testModules are for tests of this repository alone; nobody installs them.
var testModules = []string{"launcher/browsertest/go.mod", "launcher/internal/kube/k8stest/go.mod", "launcher/internal/bucket/s3test/go.mod", "launcher/internal/bucket/gcstest/go.mod"}

// checkReplace forbids replace directives: go run and go install refuse a module that has them, and they hide what is built.
// The browser tests are not installed, and must test the tree they are in.
func checkReplace(root fs.FS) (faults []string) {
	directive := regexp.MustCompile(`^\s*replace\b`)
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || path.Base(name) != "go.mod" || slices.Contains(testModules, name) {
			return err
		}
		text, err := fs.ReadFile(root, name)
		for i, line := range strings.Split(string(text), "\n") {
			if directive.MatchString(line) {
				faults = append(faults, fmt.Sprintf("%s:%d: replace is not allowed: go install refuses modules with it", name, i+1))
			}
		}
		return err
	})
	if err != nil {
		faults = append(faults, err.Error())
	}
	return faults
}

// checkTestCommand wants the README to name the one command that .ci/run takes from it and runs.
func checkTestCommand(root fs.FS) (faults []string) {
	text, err := fs.ReadFile(root, "README.md")
	if err != nil {
		return []string{err.Error()}
	}
	if !regexp.MustCompile(`(?m)^\s*(\$ )?go test \./\.\.\.$`).Match(text) {
		faults = append(faults, "README.md: no line is the command go test ./..., which .ci/run looks for")
	}
	return faults
}

// Each rule must find what it forbids and let the rest be.
func TestRulesCanFail(t *testing.T) {
	sample := fstest.MapFS{}
	for name, text := range map[string]string{
		"go.mod":                         "module " + module + "\n\nrequire x v1.0.0\n\nreplace x => ../x\n",
		"docs/architecture.md":           "`rng` `nn` `trainer` `launcher` `internal/compute/kernel` `internal/gone`",
		"docs/guarantees.md":             "| promise | held by |\n|---|---|\n| one | `trainer.TestA`, `trainer.TestGone` |\n| two | |\n",
		"trainer/a_test.go":              "package trainer\n\nfunc TestA() {}\n",
		"README.md":                      "Run go test ./... now.\n",
		"rng/rng.go":                     "// Package rng is fine.\npackage rng\n\nimport _ \"" + module + "/internal/compute/kernel\"\n",
		"internal/compute/kernel/a.go":   "// Package kernel is one.\npackage kernel\n\nimport \"math\"\n\nvar _, _ = math.Exp(1), math.Sqrt(2)\n",
		"internal/compute/kernel/b.go":   "// Package kernel is two.\npackage kernel\n",
		"internal/compute/kernel/g/g.go": "//go:build ignore\n\n// Package g is fine.\npackage g\n\nimport \"math/rand/v2\"\n\nvar _ = rand.Int\n",
		"trainer/trainer.go":             "// It trains.\npackage trainer\n\nimport m \"math\"\n\nvar _ = m.Tanh(1)\n",
		"trainer/trainer_test.go": "package trainer_test\n\nimport (\n\t\"math\"\n\t\"time\"\n\n\t_ \"" + module + "/nn\"\n)\n\n" +
			"func f() { time.Sleep(time.Duration(math.Exp(1))) }\n",
		"trainer/sync_test.go": "package trainer_test\n\nimport (\n\t\"testing/synctest\"\n\t\"time\"\n)\n\nfunc g() {\n" +
			"\tsynctest.Test(nil, func() { time.Sleep(1) })\n\tfor !done() {\n\t\ttime.Sleep(1)\n\t}\n\ttime.Sleep(1)\n" +
			"\tfor i := 0; i < 9; i++ {\n\t\ttime.Sleep(1)\n\t}\n}\n",
		"nn/nn.go":                              "package nn\n\nimport _ \"" + module + "/trainer\"\n",
		"nn/nn_test.go":                         "package nn\n\nimport _ \"" + module + "/launcher/sub\"\n",
		"launcher/main.go":                      "// Command launcher is fine.\npackage main\n\nimport _ \"github.com/charmbracelet/bubbletea\"\n",
		"internal/host/agent.go":                "// Package agent is fine.\npackage agent\n\nimport _ \"github.com/charmbracelet/bubbletea\"\n",
		"internal/host/session.go":              "package agent\n\nimport _ \"" + module + "/internal/chaos\"\n",
		"internal/compute/kernel/asm/go.mod":    "module asm\n\nreplace (\n\tx => ../x\n)\n",
		"internal/compute/kernel/asm/main.go":   "package main\n\nimport _ \"github.com/mmcloughlin/avo/build\"\n",
		"internal/compute/kernel/testdata/x.go": "not Go\n",
	} {
		sample[name] = &fstest.MapFile{Data: []byte(text)}
	}
	files, err := parse(sample)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		rule string
		got  []string
		want []string // beginnings, in any order
	}{
		{"imports", checkImports(files, importRules), []string{
			"internal/compute/kernel/g/g.go:6: internal/compute/kernel/g must not import math/rand/v2: every draw",
			"internal/host/agent.go:4: internal/host must not import github.com/charmbracelet/bubbletea: only the view",
			"internal/host/session.go:3: internal/host must not import " + module + "/internal/chaos: what detects, plans",
			"nn/nn_test.go:3: nn must not import " + module + "/launcher/sub: launcher, examples and bench are ends",
			"rng/rng.go:4: rng must not import " + module + "/internal/compute/kernel: rng, internal/id, internal/timing and internal/faults are leaves",
		}},
		{"floors", checkFloors(files, [][]string{{"rng"}, {"..."}}), nil},
		{"floors upside down", checkFloors(files, [][]string{{"internal/..."}, {"rng"}}), []string{
			"launcher/main.go: launcher has no floor", "nn/nn.go: nn has no floor",
			"rng/rng.go:4: rng must not import internal/compute/kernel, which is above it",
			"trainer/trainer.go: trainer has no floor",
		}},
		{"sizes", checkSizes(append(slices.Clone(files), slices.Repeat([]file{files[0]}, maxFiles)...)), []string{files[0].dir() + ": has "}},
		{"map", checkMap(files, sample), []string{
			"docs/architecture.md: internal/gone is not there", "docs/architecture.md: the map does not name internal/compute/kernel/g",
			"docs/architecture.md: the map does not name internal/host",
		}},
		{"guarantees", checkGuarantees(files, sample), []string{
			`docs/guarantees.md: no test holds "two"`, "docs/guarantees.md: trainer.TestGone is not there",
		}},
		{"package comments", checkPackageComments(files), []string{
			"internal/compute/kernel: has 2 package comments [internal/compute/kernel/a.go internal/compute/kernel/b.go], want one",
			"nn: has 0 package comments",
			`trainer/trainer.go:1: the package comment must begin with "Package trainer "`,
		}},
		{"uneven math", checkUnevenMath(files, bitFeeders), []string{
			"internal/compute/kernel/a.go:6: math.Exp gives",
			"trainer/trainer.go:6: math.Tanh gives",
		}},
		{"sleeps", checkSleeps(files), []string{
			"trainer/sync_test.go:13: time.Sleep", "trainer/sync_test.go:15: time.Sleep", "trainer/trainer_test.go:10: time.Sleep",
		}},
		{"replace", checkReplace(sample), []string{"go.mod:5: replace", "internal/compute/kernel/asm/go.mod:3: replace"}},
		{"test command", checkTestCommand(sample), []string{"README.md: no line"}},
	} {
		slices.Sort(c.got)
		if len(c.got) != len(c.want) {
			t.Errorf("%s: found %q, want %d faults", c.rule, c.got, len(c.want))
			continue
		}
		for i, want := range c.want {
			if !strings.HasPrefix(c.got[i], want) {
				t.Errorf("%s: found %q, want it to begin with %q", c.rule, c.got[i], want)
			}
		}
	}
}

// Every rule of the table must be able to fail: a package that it covers, importing what it bans, is a fault with its reason.
func TestImportRulesCanFail(t *testing.T) {
	concrete := func(pattern string) string {
		p := strings.TrimSuffix(strings.TrimSuffix(pattern, "..."), "/")
		if p == "" || p == module {
			p = path.Join(p, "comm")
		}
		return p
	}
	for _, r := range importRules {
		for _, from := range r.from {
			for _, ban := range r.ban {
				dir, imported := concrete(from), concrete(ban)
				if matches([]string{"launcher/...", "examples/...", "bench/...", "nn/...", "trainer/...", "elastic/...", "zero/...", "comm/...",
					"internal/..."}, imported) {
					imported = module + "/" + imported
				}
				text := "package p\n\nimport _ \"" + imported + "\"\n"
				files, err := parse(fstest.MapFS{path.Join(dir, "p.go"): {Data: []byte(text)}})
				if err != nil {
					t.Fatal(err)
				}
				if faults := checkImports(files, []importRule{r}); len(faults) != 1 || !strings.HasSuffix(faults[0], r.why) {
					t.Errorf("%s importing %s: found %q, want one fault with the reason %q", dir, imported, faults, r.why)
				}
			}
		}
	}
}
