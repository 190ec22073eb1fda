import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./style/base.css";
import "./style/run.css";
import "./style/trace.css";
import { index, start } from "./data";
import { ComparePage } from "./pages/compare";
import { RunsPage } from "./pages/runs";
import { TracePage } from "./pages/trace";
import { Top } from "./parts/top";
import { follow, route, type Route } from "./route";
import type { Index } from "./types";

function Page({ index, at }: { index: Index; at: Route }) {
  if (at.at === "trace") return <TracePage runs={index.runs} run={at.run} id={at.id} />;
  if (at.at === "compare") return <ComparePage all={index.runs} pair={at.runs} left={at.left} right={at.right} />;
  return <RunsPage runs={index.runs} />;
}

function App() {
  const names = (index.value?.runs ?? []).map((run) => run.name).join(", ");
  useEffect(() => {
    document.title = names ? `${names} · unmask` : "unmask view";
  }, [names]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>
        To the content
      </a>
      <Top />
      <main id="main" tabIndex={-1}>{index.value && <Page index={index.value} at={route.value} />}</main>
    </>
  );
}

start();
follow();
render(<App />, document.getElementById("app")!);
