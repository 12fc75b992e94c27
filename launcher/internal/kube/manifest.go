package kube

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"regexp"
	"strconv"
	"strings"
	"text/template"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/host/session"
	"github.com/soliton-train/soliton/launcher/internal/cli"
)

// Job is what a manifest describes.
type Job struct {
	Name    string
	Image   string
	Hosts   int
	Workers int      // in each pod; 0 leaves it to launcher run
	Program []string // and its flags
	Key     string
}

// label is a name in DNS. The names of pods add a number to it.
var label = regexp.MustCompile(`^[a-z]([a-z0-9-]{0,50}[a-z0-9])?$`)

// Validate reports every fault.
func (j Job) Validate() error {
	var errs faults.List
	errs.If(!label.MatchString(j.Name), "--name %.80q: give letters a to z, digits and -, at most 52 of them", j.Name)
	errs.If(j.Image == "" || strings.ContainsFunc(j.Image, func(r rune) bool { return r <= ' ' || r > '~' }), "--image %.80q: give the name of an image that contains launcher and PROGRAM", j.Image)
	errs.Add(cli.Within("hosts", j.Hosts, 1, MaxHosts))
	errs.If(!utf8.ValidString(strings.Join(j.Program, "")), "the arguments of PROGRAM are not UTF-8")
	errs.If(len(j.Program) == 0, "PROGRAM is missing: give its path in the image")
	return errs.Err()
}

// Write writes the manifest: a Secret, a headless Service and an Indexed Job.
func (j Job) Write(w io.Writer) error { return manifest.Execute(w, j) }

// Args are the arguments of launcher.
func (j Job) Args() []string {
	args := []string{"run", "--plain"}
	if j.Workers > 0 {
		args = append(args, "--workers", strconv.Itoa(j.Workers))
	}
	args = append(args, j.Program...)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "$(", "$$(") // Kubernetes would put a variable there
	}
	return args
}

// manifest is that of a job. Strings in double quotes mean in YAML what they mean in Go. Lost pods are replaced; a drain takes at most
// timing.Drain, 20 of the 60 seconds from SIGTERM to SIGKILL.
var manifest = template.Must(template.New("").Funcs(template.FuncMap{"quote": strconv.QuoteToASCII}).Parse(`# launcher manifest: kubectl apply -f FILE. The key in the Secret lets its holder take part in the run: keep this file as
# you keep passwords, and make a new one for each run.
apiVersion: v1
kind: Secret
metadata:
  name: "{{.Name}}"
  labels: {app.kubernetes.io/name: "{{.Name}}"}
type: Opaque
stringData:
  key: "{{.Key}}"
---
apiVersion: v1
kind: Service
metadata:
  name: "{{.Name}}"
  labels: {app.kubernetes.io/name: "{{.Name}}"}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {batch.kubernetes.io/job-name: "{{.Name}}"}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: "{{.Name}}"
  labels: {app.kubernetes.io/name: "{{.Name}}"}
spec:
  completionMode: Indexed
  completions: {{.Hosts}}
  parallelism: {{.Hosts}}
  backoffLimit: 1000
  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - {type: DisruptionTarget, status: "True"}
      - action: Ignore
        onExitCodes: {containerName: launcher, operator: In, values: [75]}
  template:
    metadata:
      labels: {app.kubernetes.io/name: "{{.Name}}"}
    spec:
      restartPolicy: Never
      subdomain: "{{.Name}}"
      terminationGracePeriodSeconds: 60
      containers:
        - name: launcher
          image: {{quote .Image}}
          workingDir: /run/soliton
          command: [/launcher]
          args:{{range .Args}}
            - {{quote .}}{{end}}
          env:
            - {name: SOLITON_HOSTS, value: "{{.Hosts}}"}
            - {name: SOLITON_JOB, value: "{{.Name}}"}
            - {name: SOLITON_KEY_FILE, value: /etc/soliton/key}
            - {name: HOME, value: /run/soliton}
            - {name: TMPDIR, value: /run/soliton}
          volumeMounts:
            - {name: key, mountPath: /etc/soliton, readOnly: true}
            - {name: run, mountPath: /run/soliton}
      volumes:
        - name: key
          secret: {secretName: "{{.Name}}", defaultMode: 256} # 0400
        - name: run
          emptyDir: {}
`))

// NewManifest returns the command.
func NewManifest() *cobra.Command {
	var j Job
	cmd := &cobra.Command{
		Use:   "manifest --image IMAGE --hosts N PROGRAM [program flags]",
		Short: "Print the Kubernetes objects of a run",
		Long: `manifest prints an Indexed Job of --hosts pods that train PROGRAM together, a headless Service by
which they find each other, and a Secret with the key that lets them in. The image has to contain
/launcher and PROGRAM; the Dockerfile of this repository makes such an image.

A pod that gets SIGTERM leaves the run, which the others continue, and exits with status 75.`,
		Example: `  launcher manifest --image registry/gpt --hosts 3 --workers 2 -- /train --steps 1000 | kubectl apply -f -`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("PROGRAM is missing: give its path in the image")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			j.Program = args
			if cmd.Flags().Changed("workers") {
				if err := cli.Within("workers", j.Workers, 1, session.MaxWorkers); err != nil {
					return err
				}
			}
			if err := j.Validate(); err != nil {
				return err
			}
			var key [minKey]byte
			_, _ = rand.Read(key[:]) // it never fails
			j.Key = hex.EncodeToString(key[:])
			return cli.Fail(j.Write(cmd.OutOrStdout()))
		},
	}
	flags := cmd.Flags()
	flags.SetInterspersed(false) // what follows PROGRAM is the program's
	flags.SortFlags = false
	flags.StringVar(&j.Image, "image", "", "`image` with /launcher and PROGRAM")
	flags.IntVar(&j.Hosts, "hosts", 3, "pods, each of which is a host of the run")
	flags.IntVar(&j.Workers, "workers", 0, "worker processes in each pod (default as launcher run)")
	flags.StringVar(&j.Name, "name", "soliton", "name of the objects")
	return cmd
}
